"""GGUF, llama.cpp's format: metadata, tokeniser and tensors in one or several files."""
