"""`python -m quaxlike.lm.finetune`: QLoRA fine-tuning of a local checkpoint, producing a PEFT adapter."""

__all__: list[str] = []
