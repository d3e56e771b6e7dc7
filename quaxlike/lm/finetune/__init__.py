"""`python -m quaxlike.lm.finetune`, which fine-tunes a local checkpoint by QLoRA. The result is a PEFT
adapter."""

__all__: list[str] = []
