"""Where blobs rest. Knows no meaning."""
