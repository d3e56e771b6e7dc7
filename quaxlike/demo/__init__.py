"""`python -m quaxlike.demo`: fine-tunes a vision transformer in full, by LoRA, and by QLoRA."""
