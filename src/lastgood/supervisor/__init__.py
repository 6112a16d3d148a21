"""The process that starts the ranks of a job, watches them, and starts them again: `lastgood run`."""
