"""The built-in ETP primitives, one kind of operation a file."""
