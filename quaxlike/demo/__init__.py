"""`python -m quaxlike.demo`, which fine-tunes a vision transformer in full, by LoRA, and by QLoRA."""
