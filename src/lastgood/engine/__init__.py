"""Movers: they take records and a byte budget and decide nothing."""
