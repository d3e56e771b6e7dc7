"""What the tests share."""

import pytest

_MODULE = """
from tests.samples import Late

late, test_late, TestLate = Late("no_such_package"), Late("no_such_package"), Late("no_such_package")
"""


def test_to_collect_imports_no_late_package(request, tmp_path):
    """pytest, and our hooks, look for marks and fixtures behind every name of a module."""
    file = tmp_path / "test_late.py"
    file.write_text(_MODULE)
    module = pytest.Module.from_parent(request.session, path=file)
    assert module.collect() == []
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        module.obj.late.anything  # noqa: B018
