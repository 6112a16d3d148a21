"""Live training state <-> named tensors and values: capture, match, and how it is put back. Imports torch."""
