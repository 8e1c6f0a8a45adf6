"""Data sets: folders, and generated ones."""
