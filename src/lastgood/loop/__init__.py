"""The training thread: when to save, what to copy, how to restore. Imports torch."""
