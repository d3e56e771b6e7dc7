"""GGUF, the format of llama.cpp: metadata, tokeniser and tensors in one or several files."""
