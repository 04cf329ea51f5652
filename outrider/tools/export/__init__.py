"""The command `export`: write a draft as another engine reads it, with the command that runs it there."""
