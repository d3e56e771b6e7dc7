"""Hooks of MkDocs: the version at the foot of pages, CONTRIBUTING.md as a page."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_ROOT = Path(__file__).resolve().parents[1]


def on_config(config: Any) -> Any:
    namespace: dict[str, str] = {}
    exec((_ROOT / "quaxlike" / "_version.py").read_text(), namespace)
    config.copyright = f"quaxlike {namespace['__version__']}"
    return config


def on_files(files: Any, config: Any) -> Any:
    # Hosts look for it at the root.
    text = (_ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "contributing.md", content=text))
    return files
