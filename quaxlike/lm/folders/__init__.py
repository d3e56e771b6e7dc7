"""Folders of checkpoints: configurations, further files, and atomic writing of both."""
