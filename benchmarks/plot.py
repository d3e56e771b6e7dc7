"""`python -m benchmarks.plot FILE.json... --output FILE.png`: a plot of the ratios that `--json` wrote."""

import argparse
import json
import pathlib

import matplotlib.pyplot as plt
import numpy as np

PEERS = {"quax": "quax 0.4.6", "by hand": "by hand", "plain": "plain JAX"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument(
        "results", type=pathlib.Path, nargs="+", help="what `--json` wrote, one per JAX release"
    )
    parser.add_argument("--output", type=pathlib.Path, required=True)
    args = parser.parse_args()
    results = {path.stem: json.loads(path.read_text()) for path in args.results}
    fig, axes = plt.subplots(1, len(results), figsize=(6.5 * len(results), 6), sharey=True, squeeze=False)
    for ax, (name, measured) in zip(axes[0], results.items(), strict=True):
        _draw(ax, name, [m for m in measured if m["quaxlike_to"]])
    axes[0][0].legend(loc="lower left", frameon=False)
    fig.tight_layout()
    fig.savefig(args.output, dpi=110)


def _draw(ax: plt.Axes, name: str, measured: list[dict]) -> None:
    rows = [m for m in measured if PEERS.keys() & m["quaxlike_to"].keys()]
    at = np.arange(len(rows))[::-1]
    for marker, (peer, label) in zip("sDo", PEERS.items(), strict=True):
        points = [
            (m["quaxlike_to"][peer], y) for m, y in zip(rows, at, strict=True) if peer in m["quaxlike_to"]
        ]
        ax.scatter(*zip(*points, strict=True), marker=marker, label=label)
    ax.axvline(1, color="grey", linewidth=0.8)
    ax.set_xscale("log")
    ax.set_xlabel("time of quaxlike ÷ time of the other")
    ax.set_yticks(at, [m["case"] for m in rows])
    ax.set_title(name)
    ax.grid(axis="x", alpha=0.3)


if __name__ == "__main__":
    main()
