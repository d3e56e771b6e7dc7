"""`python -m quaxlike.generate`: texts that a local checkpoint of transformers goes on with."""

__all__: list[str] = []
