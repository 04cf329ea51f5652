"""The command `audit`: test that speculation leaves the output of a pair unchanged."""
