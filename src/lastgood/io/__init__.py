"""Bytes: digests and the file system. Knows no tensor and no checkpoint."""
