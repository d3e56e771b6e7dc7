"""The names that users import, and their documentation."""

import inspect
import re
from pathlib import Path

import pytest

from quaxlike import utils

NAMES = [
    "dataclass",
    "field",
    "lens_field",
    "LensField",
    "HasLensFields",
    "Lens",
    "no_post_init",
    "enable_post_init",
    "skip_post_init_if_disabled",
    "jit",
    "vectorize",
    "shard_map",
    "linearize",
    "sequential_vmap_with_vjp",
    "tree_structure",
    "PyTreeDef",
    "SupportsTreeMatch",
    "tree_map",
    "tree_stack",
    "tree_concat",
    "tree_zeros_like",
    "tree_where_broadcast_last",
    "HasScatterArgs",
    "ScatterArgs",
    "tree_scatter_set",
    "key_chain",
    "isin",
    "kahan_summation",
    "non_differentiable",
    "no_jax_tracing",
    "NotJaxCompatibleError",
    "is_traced",
]


def test_names():
    public = {n for n, x in vars(utils).items() if not n.startswith("_") and not inspect.ismodule(x)}
    assert public == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_documented(name: str):
    page = (Path(__file__).resolve().parents[2] / "docs" / "utils.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    imported = {
        name.strip()
        for names in re.findall(r"from quaxlike.utils import (?:\(([^)]*)\)|(.*))", code)
        for name in "".join(names).split(",")
    }
    if name != "Lens":  # a class that is used, and not imported
        assert name in imported
        assert len(re.findall(rf"\b{name}\b", code)) > 1, "imported and used"
    assert f"::: quaxlike.utils.{name}\n" in page
    documented = inspect.getdoc(getattr(utils, name)) or ""
    if inspect.isfunction(getattr(utils, name)):
        assert "**Returns:**" in documented
        assert "!!! example" in documented
