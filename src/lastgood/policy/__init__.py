"""Deciders: pure functions over records; no I/O, no clock, no threads."""
