"""Checkpoint folders: configurations, accompanying files, and atomically replacing them."""
