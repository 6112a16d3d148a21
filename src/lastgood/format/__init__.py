"""What the stored bytes mean. Nothing here knows where they are stored."""
