"""Reading and writing checkpoints of language models."""
