"""Counts lines of code, so that no limit on them discourages a comment."""

import ast
import io
import tokenize
from pathlib import Path


def lines_of_code(file: Path) -> int:
    """The lines of a file without empty lines, comments and docstrings (of attributes, too)."""
    source = file.read_text(encoding="utf-8")
    docs = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.string.strip() and token.type != tokenize.COMMENT
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docs)
