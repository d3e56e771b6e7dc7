"""What transformers and PEFT read: `pip install '.[test,huggingface]'`, then `pytest -m huggingface`."""

from importlib.util import find_spec

if any(find_spec(package) is None for package in ("torch", "transformers", "peft")):
    collect_ignore_glob = ["test_*.py"]
