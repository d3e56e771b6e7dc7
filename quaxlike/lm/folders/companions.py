"""The files accompanying a model's weights.

These are the tokeniser, chat templates, generation settings, and any sentence-transformers modules. Weights
must never be left next to another model's tokeniser: this would load successfully, but generate nonsense.
"""

import filecmp
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..._files import replacing
from ...files.errors import CheckpointError, file_error, hub_hint, quoted
from ...files.json_text import read_json_file, read_json_list

# transformers' names. The essential tokeniser files come first, so that they are replaced last.
_NAMES = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "special_tokens_map.json"),
    *("tokenizer_config.json", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
_TEMPLATES = "additional_chat_templates"
# sentence-transformers' list of modules. Each of them has its own folder.
_MODULES = "modules.json"
_OF_MODULES = (_MODULES, "config_sentence_transformers.json", "sentence_*_config.json")
# Settings from other quantisation tools. Readers use them if config.json doesn't have any.
_OF_WEIGHTS = ("quantize_config.json", "hf_quant_config.json")


def companion_files(folder: Path) -> dict[str, Path]:
    """Returns the files accompanying the weights in a checkpoint, keyed by name.

    **Raises:** `CheckpointError` if one of them isn't a regular file, or links to outside the folder (other
    than into a Hugging Face cache).
    """
    base = Path(os.path.realpath(folder))
    roots = [base, *([base.parents[1] / "blobs"] if base.parent.name == "snapshots" else [])]
    out: dict[str, Path] = {}
    for name in _present(folder):
        file = Path(os.path.realpath(folder / name))
        if not any(file.is_relative_to(root) for root in roots):
            problem = f"links to {file}, outside of the folder; put a copy of that file in its place"
            raise file_error(folder / name, None, problem)
        if not file.is_file():
            raise file_error(folder / name, None, "is not a regular file, and cannot be copied")
        out[name] = file
    return out


def stage_copies(files: dict[str, Path], folder: Path, stack: ExitStack) -> None:
    """Copies files into a folder under temporary names. They get their final names once `stack` is closed."""
    for name, file in files.items():
        target = folder / name
        if target.exists() and target.samefile(file):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        written = stack.enter_context(replacing(target))
        with open(file, "rb") as source:
            shutil.copyfileobj(source, written)
        written.flush()


def remove_others(folder: Path, files: dict[str, Path]) -> None:
    """Removes all accompanying files that differ from those in `files`.

    Do this before adding the new files. This way, weights are never left next to another model's tokeniser,
    even if the process is killed in between.
    """
    for name in _present(folder):
        if name not in files:
            (folder / name).unlink()
        elif not filecmp.cmp(folder / name, files[name], shallow=False):
            # If this is a link then its target would be replaced, so remove that.
            os.unlink(os.path.realpath(folder / name))
    for name in _OF_WEIGHTS:
        (folder / name).unlink(missing_ok=True)


def _present(folder: Path) -> list[str]:
    names = [name for name in _NAMES if os.path.lexists(folder / name)]
    templates = folder / _TEMPLATES
    names += [f"{_TEMPLATES}/{path.name}" for path in sorted(templates.glob("*.jinja"))]
    if os.path.lexists(folder / _MODULES):
        names += [path.name for pattern in _OF_MODULES for path in sorted(folder.glob(pattern))]
        own = (path for module in module_folders(folder) for path in sorted((folder / module).rglob("*")))
        names += [str(path.relative_to(folder)) for path in own if not path.is_dir() or path.is_symlink()]
    return names


def hint_for(path: str | os.PathLike[str]) -> str:
    """Suggests how to proceed if a folder doesn't contain a model. This ends an error message."""
    folder = Path(path)
    about = folder / "adapter_config.json"
    if about.is_file():
        try:
            base = read_json_file(about, "the configuration").get("base_model_name_or_path")
        except CheckpointError:
            base = None
    elif (folder / "adapters.safetensors").is_file():
        base = None
    else:
        return hub_hint(path)
    named = quoted(base) if isinstance(base, str) and base else "its base model"
    return (
        f" The folder holds an adapter, which is put on {named}: the model is that one's folder "
        f"(`--model`), and the adapter is {folder} (`--adapter`, or `lm.peft.load_adapter`)."
    )


def module_folders(folder: Path) -> list[str]:
    """Lists the folders of all sentence-transformers modules other than the model itself."""
    return [found for _, found in modules_of(folder) if found]


def modules_of(folder: Path) -> list[tuple[str, str]]:
    """Lists each sentence-transformers module's class name and folder ("" for the model itself).

    **Raises:** `CheckpointError` if `modules.json` is damaged, or refers to a path outside the folder.
    """
    path = folder / _MODULES
    if not path.is_file():
        return []
    out: list[tuple[str, str]] = []
    for module in read_json_list(path, "the list of modules"):
        found = module.get("path") if isinstance(module, dict) else None
        parts = Path(found).parts if isinstance(found, str) else ("..",)
        if ".." in parts or Path(*parts).is_absolute():
            raise file_error(
                path, None, f"modules must name folders inside of this one; found {quoted(module)}"
            )
        out.append((str(module.get("type")).rpartition(".")[2], str(found) if parts else ""))
    return out


def named_ends(folder: Path, config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Returns the end-of-text tokens from `generation_config.json` and then from `config.json`.

    **Raises:** `CheckpointError` if any of these isn't a token id below 2³¹.
    """
    path = folder / "generation_config.json"
    settings = read_json_file(path, "the settings of generation") if path.is_file() else {}
    found: dict[str, list[int]] = {}
    for name, entries in ((path.name, settings), ("config.json", config)):
        ends = entries.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if not all(type(end) is int and 0 <= end < 2**31 for end in ends):
            raise CheckpointError(
                f"{folder} has eos_token_id={quoted(ends)}; expected the numbers of tokens."
            )
        if ends:
            found[name] = ends
    return found
