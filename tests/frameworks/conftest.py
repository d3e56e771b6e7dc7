"""Programs of other packages: `pip install '.[test,frameworks]'`, then `pytest -m frameworks`."""

from importlib.util import find_spec

if not all(map(find_spec, ("flax", "haiku", "numpyro"))):
    parts = ("dicts", "nnx", "nnx_transforms", "nnx_written", "programs", "twins")
    collect_ignore = [f"test_{part}.py" for part in parts]
