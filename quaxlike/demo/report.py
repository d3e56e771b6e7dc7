"""The closing tables: the cost and accuracy of each method, and the rules that it used."""

from collections import Counter
from pathlib import Path

import jax.numpy as jnp
from rich.table import Table

import quaxlike as ql

from .data import Digits
from .experiment import Result
from .train import loss

_PACKAGE = Path(ql.__file__).parent


def results_table(pretraining: Result, adapted: list[Result]) -> Table:
    """The table with one row per training run."""
    table = Table(title="Upright digits, then digits turned by 90°", title_justify="left")
    table.add_column("method", no_wrap=True)
    for column in ("before", "after", "trained", "weights", "training", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in (pretraining, *adapted):
        memory = result.training_bytes
        table.add_row(
            result.name,
            f"{result.accuracy_before:.1%}",
            f"{result.accuracy:.1%}",
            f"{result.trainable_parameters:,}",
            f"{memory['weights'] / 1000:,.0f} kB",
            f"{sum(memory.values()) / 1000:,.0f} kB",
            f"{result.fit.seconds:.1f}",
            end_section=result is pretraining,
        )
    table.caption = (
        "before, after: held-out digits that were recognised; trained: parameters; weights: what a "
        "copy of the model takes; training: weights, gradients and the two moments of AdamW"
    )
    table.caption_justify = "left"
    return table


def rules_table(adapted: list[Result], digits: Digits) -> Table:
    """The table of rules that each model's loss used, and of operations that materialised a weight."""
    table = Table(
        title="Which rules multiply by the new weights, in one evaluation of the loss", title_justify="left"
    )
    for column in ("method", "operation", "type of weight", "rule, in quaxlike/", "times"):
        table.add_column(column, justify="right" if column == "times" else "left")
    images, labels = map(jnp.asarray, digits)
    lost: list[str] = []
    for result in adapted:
        report = ql.explain(loss)(result.fit.model, images, labels)
        followed: Counter[tuple[str, str, str]] = Counter()
        for row in report.rules:
            types = [operand.split()[0] for operand in row.operands if " " in operand]
            written = (row.rule or "").removeprefix(f"{_PACKAGE}/")
            followed[row.primitive, ", ".join(types), written] += row.count
        for (primitive, types, rule), times in followed.items():
            table.add_row(result.name, primitive, types, rule, str(times))
        lost += [f"{result.name}: {row.primitive} at {row.source}" for row in report.materialised]
    table.caption = f"Weights that became dense: {'; '.join(lost) or 'none'}"
    table.caption_justify = "left"
    return table
