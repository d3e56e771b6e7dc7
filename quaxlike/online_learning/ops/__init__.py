"""The built-in ETP primitives, one kind of operation per file."""
