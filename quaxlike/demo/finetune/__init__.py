"""`python -m quaxlike.demo.finetune`: QLoRA on a local checkpoint of transformers, to an adapter for PEFT."""
