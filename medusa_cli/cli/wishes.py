"""How texts are wanted: the flags about choosing, ending and writing, each kind a dataclass."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from medusa_cli.cli.streaming import Wish
from medusa_cli.cli.streams import as_written
from medusa_cli.config.recipe import NEW_TOKENS


@dataclass(frozen=True)
class ChoosingFlags:
    """How tokens are chosen; the names are `Sampling`'s."""

    acceptance: Annotated[
        Literal["greedy", "lossless", "typical"] | None,
        typer.Option(
            "--acceptance",
            help="greedy and lossless are exact: the model's own text, or its own law. typical is not: it keeps "
            "what is likely. [default: by temperature]",
        ),
    ] = None
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, metavar="T", help="0 decodes greedily.")] = 0.0
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            metavar="P",
            help="Sample from the best tokens of this mass. [default: as the model's settings say]",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", min=0, metavar="K", help="Sample from the K best; 0: all. [default: as above]"),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p", metavar="P", help="Sample from tokens this likely beside the best one. [default: as above]"
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            "--repetition-penalty",
            metavar="X",
            help="Above 1: tokens of the text so far become less likely, greedily too. [default: as above]",
        ),
    ] = None
    min_new_tokens: Annotated[
        int, typer.Option("--min-new-tokens", min=0, metavar="N", help="No stop id before as many tokens.")
    ] = 0
    posterior_threshold: Annotated[
        float | None,
        typer.Option("--posterior-threshold", metavar="P", help="typical: keep what is likelier. [default: 0.09]"),
    ] = None
    posterior_alpha: Annotated[
        float | None,
        typer.Option(
            "--posterior-alpha", metavar="A", help="typical: or likelier than this, where any is unsure. [default: 0.3]"
        ),
    ] = None

    @property
    def is_idle(self) -> bool:
        """Whether numbers about drawing were given where nothing is drawn."""
        return self.temperature == 0 and (self.top_p is not None or bool(self.top_k) or self.min_p is not None)

    def check(self) -> None:
        """Refuse numbers that mean nothing; Typer's own bounds can't leave an end out."""
        from medusa_cli.config.recipe import COLDEST

        if 0 < self.temperature < COLDEST:
            raise typer.BadParameter(
                f"--temperature {self.temperature:g} is too close to 0; 0 takes the best token always"
            )
        for flag, share in {"--top-p": self.top_p, "--min-p": self.min_p}.items():
            if share is not None and not 0 < share <= 1:
                raise typer.BadParameter(f"{flag} is a share: above 0, at most 1")
        if self.posterior_threshold is not None and not 0 < self.posterior_threshold < 1:
            raise typer.BadParameter("--posterior-threshold is a probability: above 0, below 1")
        if self.posterior_alpha is not None and not 0 < self.posterior_alpha < math.inf:
            raise typer.BadParameter("--posterior-alpha is a factor above 0")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < math.inf:
            raise typer.BadParameter("--repetition-penalty is a factor above 0; 1 changes nothing")


@dataclass(frozen=True)
class EndingFlags:
    """How much is written, and how it ends."""

    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, metavar="N", help="Budget of new tokens.")
    ] = NEW_TOKENS
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Stop ids don't end the text: always write --max-new-tokens.")
    ] = False
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text; may be given again.")
    ] = None

    def check(self) -> None:
        """Refuse a stop that is everywhere."""
        if self.stop and not all(self.stop):
            raise typer.BadParameter("--stop needs some text to stop at")

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end a text."""
        return tuple(as_written(text) for text in self.stop or ())


@dataclass(frozen=True)
class WritingFlags:
    """How prompts are taken together, shown and judged."""

    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, metavar="N", help="Prompts of a file written at once.")
    ] = 8
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Show the text while it is written.")] = True
    check: Annotated[bool, typer.Option("--check", help="Decode plainly as well; exit 3 at a mismatch.")] = False

    def check_usage(self, choosing: ChoosingFlags) -> None:
        """Refuse what can't be judged."""
        if self.check and choosing.temperature > 0:
            raise typer.BadParameter("--check judges greedy texts, by how near a tie was; leave out --temperature")

    def wish(self, chat: bool | None, ending: EndingFlags, own_stops: tuple[str, ...]) -> Wish:
        """What is wanted, the model's own stops among it."""
        stops = (*ending.stops, *own_stops)
        return Wish(ending.max_new_tokens, chat, stops, ending.ignore_eos, self.stream, self.check, self.batch_size)
