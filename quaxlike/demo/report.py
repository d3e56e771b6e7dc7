"""The closing tables: the cost and accuracy of each method, and the rules that it used."""

import re
from collections import Counter
from pathlib import PurePath

import jax.numpy as jnp
from rich.table import Table

import quaxlike as ql

from ..surgery.summary import Summary
from .data import Digits
from .experiment import ADAPTED, Result
from .train import loss


def float32_share(summary: Summary) -> float:
    """Stored bytes of the adapted layers, as a share of their dense size in float32."""
    rows = [row for row in summary.rows if re.fullmatch(ADAPTED, row.path)]
    return sum(row.stored_bytes for row in rows) / sum(row.logical_bytes for row in rows)


def results_table(pretraining: Result, adapted: list[Result]) -> Table:
    """The table with one row per training run."""
    table = Table(title="Upright digits, then digits turned by 90°", title_justify="left")
    table.add_column("method", no_wrap=True)
    for column in ("before", "after", "trained", "stored", "share", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in (pretraining, *adapted):
        summary = ql.summary(result.fit.model)
        table.add_row(
            result.name,
            f"{result.accuracy_before:.1%}",
            f"{result.accuracy:.1%}",
            f"{result.trainable_parameters:,}",
            f"{summary.stored_bytes / 1000:,.0f} kB",
            f"{float32_share(summary):.2f}",
            f"{result.fit.seconds:.1f}",
            end_section=result is pretraining,
        )
    table.caption = (
        "before, after: accuracy on held-out digits; trained: parameters; stored: all weights; "
        "share: bytes of the adapted layers, adapters included, against float32"
    )
    table.caption_justify = "left"
    return table


def rules_table(adapted: list[Result], digits: Digits) -> Table:
    """The table of rules that each model's loss used, and of operations that materialised a weight."""
    table = Table(title="Rules followed in one evaluation of the loss", title_justify="left")
    for column in ("method", "primitive", "of", "rule", "times"):
        table.add_column(column, justify="right" if column == "times" else "left")
    images, labels = map(jnp.asarray, digits)
    lost: list[str] = []
    for result in adapted:
        report = ql.explain(loss)(result.fit.model, images, labels)
        followed: Counter[tuple[str, str, str]] = Counter()
        for row in report.rules:
            types = [operand.split()[0] for operand in row.operands if " " in operand]
            *_, package, rule = PurePath(row.rule or "").parts
            followed[row.primitive, ", ".join(types), f"{package}/{rule}"] += row.count
        for (primitive, types, rule), times in followed.items():
            table.add_row(result.name, primitive, types, rule, str(times))
        lost += [f"{result.name}: {row.primitive} at {row.source}" for row in report.materialised]
    table.caption = f"materialised: {'; '.join(lost) or 'nothing'}"
    table.caption_justify = "left"
    return table
