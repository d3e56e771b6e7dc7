"""Tools for testing custom types under all transforms, and for testing functions on many kinds of Values."""

from .check import check_type
from .functions import check_program
from .refusing import refuses, reveal
from .report import Check, ProgramReport, TypeReport

__all__ = ["Check", "ProgramReport", "TypeReport", "check_program", "check_type", "refuses", "reveal"]
