"""The agent: a process that outlives the training process and copies what is in memory to the places below."""
