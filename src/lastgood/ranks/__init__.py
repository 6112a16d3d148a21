"""What the ranks of a torch process group divide between them, and check against each other. Imports torch."""
