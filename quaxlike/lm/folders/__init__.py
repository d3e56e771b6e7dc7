"""Tools for reading the files in checkpoint folders, and for replacing them atomically."""
