"""Transformations of whole models: selecting, adapting, quantising, merging and counting their weights."""
