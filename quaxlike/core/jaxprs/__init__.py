"""Jaxprs on Values: how operands are laid out as leaves; running, rewriting and caching a jaxpr."""
