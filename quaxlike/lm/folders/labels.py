"""Conversion between a classifier's labels and the entries of `config.json`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from .model_config import refused, whole

SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
#: The supported values of `problem_type`.
PROBLEMS = (SINGLE, MULTI, REGRESSION)
#: The entries of `config.json` read here.
ENTRIES = ("id2label", "label2id", "num_labels", "problem_type")


@dataclasses.dataclass(frozen=True)
class Labels:
    """The names of a classifier's outputs, along with its problem type."""

    names: tuple[str, ...] = ("LABEL_0", "LABEL_1")
    problem_type: str | None = None
    """One of `PROBLEMS`, or None if the file doesn't specify this."""

    @property
    def problem(self) -> str:
        """One of `PROBLEMS`. Default: regression for one label, otherwise a single label per input."""
        return self.problem_type or (REGRESSION if len(self.names) == 1 else SINGLE)

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> "Labels":
        """Reads the labels from a configuration. Returns `UNNAMED` if the model isn't a classifier.

        **Raises:** `UnsupportedConfigError` if any of the entries are invalid.
        """
        kinds = config.get("architectures")
        if isinstance(kinds, list) and not any(str(x).endswith("Classification") for x in kinds):
            return UNNAMED
        label, problem, found = "a classifier", config.get("problem_type"), config.get("id2label")
        if problem not in (None, *PROBLEMS):
            raise refused("problem_type", problem, label, " or ".join(PROBLEMS))
        count = whole(config, "num_labels", 2, label)
        names = numbered(min(count, 1 << 20))
        if found:
            numbers = found if isinstance(found, Mapping) else {}
            given = {str(i): name for i, name in numbers.items()}
            wanted = [str(i) for i in range(len(given))]
            if not given or {*given} != {*wanted} or not all(isinstance(x, str) for x in given.values()):
                raise refused("id2label", found, label, "a name for each number from 0 on")
            names = tuple(given[i] for i in wanted)
        if not names or (problem == SINGLE and len(names) == 1):
            raise refused("num_labels", len(names), label, "2 labels at least, or 1 for a regression")
        return cls(names, problem)

    def entries(self) -> dict[str, Any]:
        """Returns the corresponding entries of `config.json`."""
        return {
            "id2label": {str(i): name for i, name in enumerate(self.names)},
            "label2id": {name: i for i, name in enumerate(self.names)},
            "problem_type": self.problem_type,
        }


UNNAMED = Labels()


def numbered(n: int) -> tuple[str, ...]:
    """Returns transformers' default names for `n` labels."""
    return tuple(f"LABEL_{i}" for i in range(n))
