"""Movers of bytes: they read, write and check what the records that they are given describe, and make no decisions."""
