"""Presents the results in tables (costs, accuracy, rules) and in a figure (losses, memory, predictions)."""

from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

import quaxlike as ql

from .experiment import Digits, Result, loss

_PACKAGE = Path(ql.__file__).parent


def results_table(pretraining: Result, adapted: list[Result]) -> Table:
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
    """Tabulates the rules used by each model. Any operations materialising a weight are listed below."""
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


Images = Float[np.ndarray, "n 8 8"]

# These colours also differ in lightness, for greyscale and for colour-blind readers.
_COLOURS = ("#1b4965", "#2a9d8f", "#e76f51")
_RIGHT, _WRONG = "#2b8a3e", "#c92a2a"


def _smooth(losses: list[float]) -> Float[np.ndarray, " steps"]:
    """Computes an exponential moving average, initialised to the first loss."""
    smoothed = np.empty(len(losses))
    mean = losses[0]
    for i, value in enumerate(losses):
        mean = 0.9 * mean + 0.1 * value
        smoothed[i] = mean
    return smoothed


def _draw_losses(ax: Axes, adapted: list[Result]) -> None:
    for result, colour in zip(adapted, _COLOURS, strict=True):
        steps = np.arange(1, len(result.fit.losses) + 1)
        ax.plot(steps, result.fit.losses, color=colour, alpha=0.2, linewidth=0.8)
        ax.plot(steps, _smooth(result.fit.losses), color=colour, linewidth=2, label=result.name)
    ax.set(title="Training loss on rotated digits", xlabel="step", ylabel="cross-entropy")
    ax.set_yscale("log")
    ax.legend(frameon=False)


def _draw_memory(ax: Axes, adapted: list[Result]) -> None:
    """Draws the memory used by each method, split into its parts and compared with the first method."""
    places = np.arange(len(adapted))[::-1]
    memory = [result.training_bytes for result in adapted]
    start = np.zeros(len(adapted))
    for part, alpha in zip(memory[0], (1.0, 0.6, 0.3), strict=True):
        kilobytes = np.array([parts[part] / 1000 for parts in memory])
        ax.barh(places, kilobytes, left=start, color=_COLOURS, alpha=alpha, height=0.5)
        ax.barh([0], [0], color="black", alpha=alpha, label=part)
        start += kilobytes
    for place, size, result in zip(places, start, adapted, strict=True):
        saved = "" if size == start[0] else f", {size / start[0]:.0%} of {adapted[0].name}"
        text = f"{size:,.0f} kB{saved}; {result.accuracy:.1%} recognised"
        ax.text(0.01 * start[0], place + 0.29, text, va="bottom", fontsize=10)
    ax.set_yticks(places, [result.name for result in adapted])
    ax.set(title="Memory while training", xlabel="kB", ylim=(-0.5, 2.75))
    ax.legend(frameon=False, loc="lower right")


def _shown(result: Result, number: int) -> list[int]:
    """Selects the digits to show: first one still misclassified (if any), and then one per class.

    (Showing more mistakes than this would suggest a much higher error rate.)
    """
    wrong = np.flatnonzero(result.after != result.labels)[:1].tolist()
    firsts = [np.flatnonzero((result.labels == label) & (result.after == label))[:1] for label in range(10)]
    return [*wrong, *np.concatenate(firsts).astype(int).tolist()][:number]


def _draw_digits(axes: np.ndarray, result: Result, upright: Images, turned: Images) -> None:
    """Draws digits upright and rotated, along with the predictions before and after training."""
    for i, column in zip(_shown(result, axes.shape[1]), axes.T, strict=False):
        label, was, now = result.labels[i], result.before[i], result.after[i]
        colour = _RIGHT if now == label else _WRONG
        for ax, images in zip(column, (upright, turned), strict=True):
            ax.imshow(images[i], cmap="gray_r", vmin=0, vmax=1)
            for spine in ax.spines.values():
                spine.set(visible=ax is column[1], color=colour, linewidth=2)
        column[0].set_title(f"a {label}", fontsize=11)
        column[1].set_xlabel(f"{was} → {now}", color=colour, fontsize=12)
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
        if not ax.images:  # there are fewer digits than axes
            ax.set_axis_off()
    for ax, name in zip(axes[:, 0], ("upright", "turned"), strict=True):
        ax.set_ylabel(name)


def save_figure(path: Path, adapted: list[Result], upright: Images, turned: Images) -> None:
    """Saves the figure as a PNG.

    All methods are compared against the first one. The predictions are the last method's: `upright` and
    `turned` show the same digits, but the models only see the latter.
    """
    figure = Figure(figsize=(11, 7.2), dpi=130, layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[2, 1.15], squeeze=False)[:, 0]
    losses, memory = upper.subplots(1, 2)
    _draw_losses(losses, adapted)
    _draw_memory(memory, adapted)
    for ax in (losses, memory):
        ax.spines[["top", "right"]].set_visible(False)
    last = adapted[-1]
    wrong = int(np.sum(last.after != last.labels))
    lower.suptitle(
        f"{last.name}: {len(last.labels) - wrong} of {len(last.labels)} held-out digits are recognised. "
        "What it said before → after, a mistake first",
        fontsize=12,
    )
    _draw_digits(lower.subplots(2, 10, squeeze=False), last, upright, turned)
    unfinished = path.with_name(f"unfinished-{path.name}")
    figure.savefig(unfinished)
    unfinished.replace(path)
