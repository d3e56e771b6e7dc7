"""Transformations of whole models, for selecting, adapting, quantising, merging or counting their weights."""
