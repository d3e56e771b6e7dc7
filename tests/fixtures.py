"""Where the reference files are: `fixture("nf4/cases.npz")`."""

import os
from pathlib import Path

_TESTS = Path(__file__).resolve().parent

#: Small copies that travel with the repository.
DATA = _TESTS / "data"

#: The full collection, where there is one: `$QUAXLIKE_FIXTURES`, or a sibling of the repository.
FIXTURES = Path(os.environ.get("QUAXLIKE_FIXTURES") or _TESTS.parents[1] / "shared" / "fixtures")


def has_fixture(name: str) -> bool:
    """Whether the reference file or folder is here."""
    return any((root / name).exists() for root in (DATA, FIXTURES))


def fixture(name: str) -> Path:
    """The path of a reference file or folder; the copy in `tests/data` is preferred."""
    for root in (DATA, FIXTURES):
        if (root / name).exists():
            return root / name
    raise FileNotFoundError(
        f"No reference data {name!r} in {DATA} nor in {FIXTURES}. Copy it into tests/data, or set "
        "QUAXLIKE_FIXTURES to the folder that has it."
    )
