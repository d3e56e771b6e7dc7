"""`python -m quaxlike.demo`: fine-tune a vision transformer in full, by LoRA, and by QLoRA."""
