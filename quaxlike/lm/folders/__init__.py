"""Folders of checkpoints: their configurations, the files beside the weights, and both written as one."""
