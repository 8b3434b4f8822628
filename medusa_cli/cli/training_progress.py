"""How a training run is shown: a bar for each stage, a sentence for what stays, curves to whoever wants them."""

from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from medusa_cli.cli.console import Console, Progress
from medusa_cli.cli.signals import Stops
from medusa_cli.config.recipe import Recipe
from medusa_cli.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from medusa_cli.pipeline.run import Hooks
    from medusa_cli.train.curves import Curves
    from medusa_cli.train.events import Event, Reporter
    from medusa_cli.train.joint.events import JointEvent


@contextmanager
def reporter_of(recipe: Recipe, console: Console) -> "Iterator[Reporter | None]":
    """Weights & Biases, if the recipe reports there; says in the end where an offline run lies."""
    if recipe.train.report_to == "none":
        yield None
        return
    from medusa_cli.train.reporter import WandbReporter

    with closing(WandbReporter("medusa", recipe.model_dump(mode="json"))) as reporter:
        yield reporter
    if folder := reporter.offline_folder:
        console.info(f"curves: {folder} (`wandb sync {folder}` sends them)")


def _draw(curves: "Curves", file: "Path") -> bool:
    """Draw how the heads learnt; False without what it takes."""
    from medusa_cli.plots.learning import draw

    try:
        draw(curves, file)
    except MissingExtra:
        return False
    return True


def _loss(loss: float | None) -> str:
    """A loss, or that there is none: over no label it would be 0."""
    return "n/a (no word to learn from)" if loss is None else f"{loss:.3f}"


class Watch:
    """Shows a run: one bar for each stage, opened when the stage begins."""

    def __init__(self, console: Console, reporter: "Reporter | None", stops: Stops) -> None:
        self._console = console
        self._reporter = reporter
        self._stops = stops
        self._bar = ExitStack()
        self._stage = ""
        self._progress: Progress | None = None
        self._decoded = ""

    def __enter__(self) -> "Hooks":
        from medusa_cli.pipeline.run import Hooks

        stops = self._stops
        return Hooks(
            self.on_data,
            self.on_event,
            self.say,
            self.warn,
            self._reporter,
            _draw,
            stop_asked=stops.asked,
            between=stops.between_steps,
            on_joint=self.on_joint,
            on_part=self.on_part,
        )

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def on_data(self, stage: str, done: int, total: int, tokens: int) -> None:
        """Samples of a data stage."""
        self._stops.check()
        progress = self._open(stage, total, done)
        progress.advance(done - progress.done, f"{tokens:,} tokens")

    def on_event(self, event: "Event") -> None:
        """A step of the training."""
        if event.kind == "save":
            return
        if event.kind == "decode":
            self._decoded = f"{event.tokens_per_step:.2f} tokens a step, {event.speedup:.2f}x  "
            best = f"; step {event.best_step} was better" if event.waited else ""
            self.say(
                f"step {event.step}: held-out prompts decode at {event.tokens_per_step:.2f} tokens a step "
                f"(chain of all heads), {event.speedup:.2f}x plain decoding projected{best}"
            )
            return
        accuracy = " ".join(f"{right:.2f}" for right in event.top1_K or [])
        if event.kind == "eval":
            given = " ".join(f"{right:.2f}" for right in event.conditional_K or [])
            self.say(
                f"step {event.step}: held-out loss {_loss(event.loss)}, right at first guess by head: {accuracy}, "
                f"where all heads before are right: {given}"
            )
            return
        progress = self._open("training", event.total_steps, event.step)
        pace = f"{event.examples_per_second:,.0f} tokens/s"
        note = f"loss {_loss(event.loss)}  heads {accuracy}  {self._decoded}{pace}"
        progress.advance(event.step - progress.done, note)

    def on_joint(self, event: "JointEvent") -> None:
        """A step of heads and adapter together."""
        if event.kind == "save":
            return
        accuracy = " ".join(f"{right:.2f}" for right in event.top1_K or [])
        kept = f"divergence {event.divergence:.4f}, same best token {event.agreement:.1%}"
        if event.kind == "eval":
            self.say(f"step {event.step}: held-out loss of the heads {_loss(event.loss)}, right {accuracy}; {kept}")
            return
        progress = self._open("heads and adapter", event.total_steps, event.step)
        progress.advance(event.step - progress.done, f"loss {_loss(event.loss)}  heads {accuracy}  {kept}")

    def on_part(self, part: str, done: int, total: int) -> None:
        """A part of what comes after the training."""
        self._stops.check()
        progress = self._open(part, total, 0)
        progress.advance(done - progress.done)

    def say(self, text: str) -> None:
        """A sentence."""
        self._console.info(text)

    def warn(self, text: str) -> None:
        """A sentence that --quiet doesn't hide."""
        self._console.warn(text)

    def _open(self, stage: str, total: int, done: int) -> Progress:
        if stage != self._stage or self._progress is None:
            self._bar.close()
            self._stage = stage
            self._progress = self._bar.enter_context(self._console.progress(stage, total, done))
        return self._progress
