"""Authenticated requests between the nodes of a job, with bulk bytes. Knows nothing of checkpoints."""
