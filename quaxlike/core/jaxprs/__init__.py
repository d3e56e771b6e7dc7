"""Jaxprs on Values: how operands are laid out as leaves, and how a jaxpr is run, rewritten and cached."""
