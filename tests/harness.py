"""Torch-free saves and loads for tests."""

from lastgood.lab.plain import State, filled, load, save

__all__ = ["State", "filled", "load", "save"]
