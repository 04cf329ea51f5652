"""Use draft models whose vocabulary differs from the target's."""
