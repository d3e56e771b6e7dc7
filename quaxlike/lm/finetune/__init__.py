"""`python -m quaxlike.lm.finetune`, for fine-tuning a local checkpoint by QLoRA. The result is a PEFT
adapter."""

__all__: list[str] = []
