"""The figure: loss curves, accuracy against size, and predictions of the adapted model."""

from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import quaxlike as ql

from .experiment import Result

# Colours differ in lightness too, for greyscale prints and colour-blind readers.
_COLOURS = ("#1b4965", "#2a9d8f", "#e76f51")
_GREY = "#8d99ae"
_RIGHT, _WRONG = "#2b8a3e", "#c92a2a"


def _smooth(losses: list[float], decay: float = 0.9) -> Float[np.ndarray, " steps"]:
    """The exponential moving average, started at the first loss."""
    smoothed = np.empty(len(losses))
    mean = losses[0]
    for i, value in enumerate(losses):
        mean = decay * mean + (1 - decay) * value
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


def _draw_sizes(ax: Axes, adapted: list[Result]) -> None:
    kilobytes = [ql.summary(result.fit.model).stored_bytes / 1000 for result in adapted]
    places = np.arange(len(adapted))[::-1]
    ax.barh(places, kilobytes, color=_COLOURS, height=0.6)
    for place, size, result in zip(places, kilobytes, adapted, strict=True):
        text = f" {size:,.0f} kB · {result.trainable_parameters:,} trained · {result.accuracy:.1%}"
        ax.text(0.02 * max(kilobytes), place + 0.38, text.strip(), va="bottom", fontsize=9)
    ax.set_yticks(places, [result.name for result in adapted])
    ax.set(title="Stored weights, parameters trained, accuracy", xlabel="kB", ylim=(-0.5, 2.9))


def _draw_digits(axes: list[Axes], result: Result, images: Float[np.ndarray, "n 8 8"]) -> None:
    """Draws the first held-out image of each class, with the predictions before and after."""
    for label, ax in enumerate(axes):
        first = int(np.argmax(result.labels == label))
        was, now = result.before[first], result.after[first]
        colour = _RIGHT if now == label else _WRONG
        ax.imshow(images[first], cmap="gray_r", vmin=0, vmax=1)
        ax.set_title(f"{was} → {now}", color=colour, fontsize=12)
        ax.set_xlabel(f"is {label}")
        ax.set_xticks([])
        ax.set_yticks([])
        for spine in ax.spines.values():
            spine.set(visible=True, color=colour, linewidth=2)


def save_figure(path: Path, adapted: list[Result], images: Float[np.ndarray, "n 8 8"]) -> None:
    """Writes the figure as a PNG.

    **Arguments:**

    - `path`: of the file.
    - `adapted`: the methods to compare; the predictions of the last one are shown.
    - `images`: the held-out images of these predictions.
    """
    figure = Figure(figsize=(11, 6.2), dpi=130, layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[2.6, 1], squeeze=False)[:, 0]
    losses, sizes = upper.subplots(1, 2)
    _draw_losses(losses, adapted)
    _draw_sizes(sizes, adapted)
    for ax in (losses, sizes):
        ax.spines[["top", "right"]].set_visible(False)
    lower.suptitle(
        f"{adapted[-1].name} on held-out digits turned by 90°: before → after adaptation",
        fontsize=12,
    )
    _draw_digits(list(lower.subplots(1, 10)), adapted[-1], images)
    unfinished = path.with_name(f"unfinished-{path.name}")
    figure.savefig(unfinished)
    unfinished.replace(path)
