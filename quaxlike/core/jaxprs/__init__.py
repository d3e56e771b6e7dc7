"""Jaxprs on Values: the layout of operands as leaves; running, rewriting and caching a jaxpr."""
