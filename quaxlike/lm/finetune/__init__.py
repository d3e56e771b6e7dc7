"""`python -m quaxlike.lm.finetune`: QLoRA on a local transformers checkpoint; writes an adapter for PEFT."""

__all__: list[str] = []
