"""Jaxprs on Values: how operands are laid out as leaves, and how we run, rewrite and cache a jaxpr."""
