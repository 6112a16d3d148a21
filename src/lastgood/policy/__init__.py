"""Deciders: pure functions over records. No I/O, no clock, no threads."""
