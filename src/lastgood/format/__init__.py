"""What the bytes mean. Knows no place."""
