"""Readers meet mutated files, public functions meet wrong arguments."""
