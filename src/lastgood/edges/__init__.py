"""Edges: other people's languages. Thin."""
