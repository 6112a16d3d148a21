"""The ranks of a job agree through a key-value store. Needs no torch, calls no collective, knows nothing of runs."""
