"""Support for GGUF, llama.cpp's file format for metadata, tokenisers and tensors."""
