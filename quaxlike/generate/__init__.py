"""`python -m quaxlike.generate`: continuation of texts by a local transformers checkpoint."""

__all__: list[str] = []
