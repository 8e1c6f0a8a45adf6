"""Data sets: the user's folders, and generated ones."""
