"""Copies of live tensors, taken behind the training loop, and the check that none was torn. Imports torch."""
