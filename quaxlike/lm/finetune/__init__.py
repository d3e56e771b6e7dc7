"""`python -m quaxlike.lm.finetune`: QLoRA on a local checkpoint; writes an adapter for PEFT."""

__all__: list[str] = []
