"""The ranks of a torch process group: their store, which part each rank writes, and the replica check. Uses torch."""
