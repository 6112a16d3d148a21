"""Copies of live tensors, taken while training goes on, and the check that none was torn. Imports torch."""
