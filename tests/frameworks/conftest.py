"""Models of Flax and Haiku: `pip install '.[test,frameworks]'`, then `pytest -m frameworks`."""

from importlib.util import find_spec

if find_spec("flax") is None or find_spec("haiku") is None:
    collect_ignore_glob = ["test_*.py"]
