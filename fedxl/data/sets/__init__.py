"""Data sets as they are published, and your own files."""
