"""Whole jobs beside what users would pick instead: transformers, bitsandbytes, PEFT, llama.cpp, scipy."""
