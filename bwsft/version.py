"""The version, apart so that any room can read it."""

__version__ = "0.1.0"
