"""Programs of other packages: `pip install '.[test,frameworks]'`, then `pytest -m frameworks`."""

from importlib.util import find_spec

if not all(map(find_spec, ("flax", "haiku", "numpyro"))):
    collect_ignore = ["test_dicts.py", "test_nnx.py", "test_nnx_transforms.py", "test_programs.py"]
