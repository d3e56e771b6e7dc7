"""What MkDocs asks of us: the version of the package at the foot of every page."""

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    namespace: dict[str, str] = {}
    exec(
        (
            Path(config.config_file_path).parent / "quaxlike" / "_version.py"
        ).read_text(),
        namespace,
    )
    config.copyright = f"quaxlike {namespace['__version__']}"
    return config
