"""Bytes: digests, erasure codes and the file system. Nothing here knows tensors or checkpoints."""
