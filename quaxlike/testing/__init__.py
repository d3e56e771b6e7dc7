"""Tests for authors of types: values under all transforms, and types that refuse to materialise."""

from .check import check_type
from .refusing import refuses, reveal
from .report import Check, TypeReport

__all__ = ["Check", "TypeReport", "check_type", "refuses", "reveal"]
