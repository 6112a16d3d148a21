"""One run on one tier: movers and deciders put together. Torch-free."""
