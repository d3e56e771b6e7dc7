"""The demonstration itself: progress bars whilst training, then the tables and the figure."""

from pathlib import Path

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import experiment
from .model import VisionTransformer
from .report import results_table, rules_table, save_figure


def show(*, seed: int, steps: int, output: Path) -> None:
    """Trains a model and adapts it in three ways, then prints tables and saves `demo.png` to a directory."""
    console = Console()
    upright, rotated = experiment.load_tasks(seed)
    model = VisionTransformer(key=jax.random.key(seed))
    progress = Progress(
        TextColumn("{task.description:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:7.4f}"),
        TimeElapsedColumn(),
        console=console,
    )

    def run(
        method: experiment.Adaptation, model: VisionTransformer, task: experiment.Task
    ) -> experiment.Result:
        bar = progress.add_task(method.name, total=steps, loss=float("nan"))

        def on_step(loss: float) -> None:
            progress.update(bar, advance=1, loss=loss)

        return experiment.run(method, model, task, steps=steps, seed=seed, on_step=on_step)

    with progress:
        pretraining = run(experiment.PRETRAINING, model, upright)
        base = pretraining.fit.model
        adapted = [
            run(method, base, rotated) for method in (experiment.FULL, experiment.LORA, experiment.QLORA)
        ]
    console.print(results_table(pretraining, adapted))
    console.print(rules_table(adapted, rotated.test))
    save_figure(output / "demo.png", adapted, upright.test.images, rotated.test.images)
    console.print(f"Figure: {output / 'demo.png'}")
