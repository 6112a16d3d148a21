"""The training side: the room that imports torch."""
