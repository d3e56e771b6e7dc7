"""`python -m quaxlike.finetune`: QLoRA on a local checkpoint of transformers, to an adapter for PEFT."""

__all__: list[str] = []
