"""Other formats: into a run and out of one. torch is imported for the formats that need it."""
