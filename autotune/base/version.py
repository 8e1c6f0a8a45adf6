"""The version of autotune, which `pyproject.toml` states, too."""

__version__ = "0.1.0"
