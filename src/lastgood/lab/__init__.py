"""Experiments: the bench. This room may import every other; none imports it."""
