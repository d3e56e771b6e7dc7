"""Reads configurations and accompanying files in checkpoint folders, and replaces them atomically."""
