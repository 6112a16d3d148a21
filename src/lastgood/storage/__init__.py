"""Storage backends (tiers): where blobs are stored. Nothing here knows what the blobs mean."""
