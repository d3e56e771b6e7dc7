"""Tools for testing a type under all transforms, and for testing a function on many kinds of Values."""

from .check import check_type
from .functions import check_program
from .refusing import refuses, reveal
from .report import Check, ProgramReport, TypeReport

__all__ = ["Check", "ProgramReport", "TypeReport", "check_program", "check_type", "refuses", "reveal"]
