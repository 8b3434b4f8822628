"""`medusa bench --url`: a server under load, asked in several ways or beside another server."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medusa_cli.cli.console import Console, GateFailed
from medusa_cli.errors import DataError

if TYPE_CHECKING:
    from medusa_cli.bench.prompt_set import Question
    from medusa_cli.bench.server_client import Load, ServerArm
    from medusa_cli.bench.server_report import ServerReport

NO_SPECULATION = "no-speculation"


@dataclass(frozen=True)
class Serving:
    """A server to be measured instead of a model that is loaded here."""

    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="Measure this server (OpenAI's API, …/v1). --compare then takes no-speculation and URLs of others.",
        ),
    ] = None
    concurrency: Annotated[
        str,
        typer.Option("--concurrency", metavar="N,N", help="With --url: requests at once, one level after the other."),
    ] = "1,4,16"
    request_rate: Annotated[
        float | None,
        typer.Option("--request-rate", min=0.001, metavar="R", help="With --url: requests a second (Poisson) instead."),
    ] = None
    served_model: Annotated[
        str | None,
        typer.Option("--served-model", metavar="NAME", help="With --url: what to ask for. [default: its only model]"),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="MEDUSA_API_KEY", metavar="KEY", help="With --url: sent with each request."),
    ] = None

    @property
    def loads(self) -> "list[Load]":
        """The levels. Raises typer.BadParameter."""
        from medusa_cli.bench.server_client import Load

        if self.request_rate is not None:
            return [Load(rate=self.request_rate)]
        words = [word.strip() for word in self.concurrency.split(",") if word.strip()]
        if not words or not all(word.isascii() and word.isdigit() and 1 <= int(word) <= 10_000 for word in words):
            raise typer.BadParameter(f"--concurrency {self.concurrency!r}: write numbers of clients, as 1,4,16")
        return [Load(clients=int(word)) for word in dict.fromkeys(words)]

    def arms(self, compare: str) -> "list[ServerArm]":
        """The server, and what it is compared with. Raises typer.BadParameter, DataError where nobody answers."""
        from medusa_cli.bench.server_client import ServerArm, find_served

        assert self.url is not None
        url = _address(self.url)
        model = self.served_model or find_served(url, self.api_key)
        arms = [ServerArm("server", url, model, self.api_key)]
        for name in dict.fromkeys(word.strip() for word in compare.split(",") if word.strip()):
            if name == NO_SPECULATION:
                arms.append(ServerArm(name, url, model, self.api_key, {"speculate": False}))
            elif "://" in name:
                # the key is for the server of --url, and no other host gets it
                other = _address(name)
                arms.append(ServerArm(name, other, find_served(other, None)))
            else:
                raise typer.BadParameter(
                    f"--compare {name}: with --url there are {NO_SPECULATION}, and URLs of servers"
                )
        return arms


@dataclass(frozen=True)
class Asked:
    """What is asked of the arms, and what fails the bench."""

    questions: "list[Question]"
    max_tokens: int
    warmups: int
    min_speedup: float | None
    require_identical: bool


def refuse_local(given: Mapping[str, Any]) -> None:
    """Raise typer.BadParameter for flags about a model that is loaded here."""
    strange = [name for name, value in given.items() if value]
    if strange:
        raise typer.BadParameter(f"{strange[0]} is about a model that is loaded here, and --url measures a server")


def refuse_remote(serving: Serving) -> None:
    """Raise typer.BadParameter for flags about a server where none is named; a key may stand in the environment."""
    strange = [flag for flag, is_set in changed(serving).items() if is_set and flag != "--api-key"]
    if strange:
        raise typer.BadParameter(f"{strange[0]} is about a server: name it with --url")


def changed(group: Any) -> dict[str, Any]:
    """Flags of a group that aren't at their defaults."""
    return {"--" + each.name.replace("_", "-"): getattr(group, each.name) != each.default for each in fields(group)}


def bench_server(serving: Serving, compare: str, asked: Asked, console: Console) -> "ServerReport":
    """Measure, and report. Raises DataError where no request of the server was answered."""
    from medusa_cli.bench.server_report import ServerReport, faults_of, level_of, verdict_of
    from medusa_cli.bench.server_run import ServerPlan, run_servers

    loads, arms = serving.loads, serving.arms(compare)
    plan = ServerPlan(asked.questions, loads, asked.max_tokens, asked.warmups)
    total = len(arms) * (len(loads) * len(asked.questions) + min(asked.warmups, len(asked.questions)))
    with console.progress("bench", total) as bar:
        measured = run_servers(arms, plan, bar.advance)
    levels = [level_of(each, [arm.name for arm in arms]) for each in measured]
    everything = [heard for each in measured for heard in each.heard]
    for arm in arms:
        if not any(level.arms[arm.name].total_output_tokens for level in levels):
            told = faults_of([heard for heard in everything if heard.arm == arm.name])
            raise DataError(
                f"{arm.name} answered no request: {told[0] if told else 'it counts no tokens'}",
                "look at the server's log, and leave out of --compare what it can't do",
            )
    return ServerReport(
        url=arms[0].url,
        model=arms[0].model,
        num_prompts=len(asked.questions),
        max_new_tokens=asked.max_tokens,
        ours=arms[0].name,
        levels=levels,
        faults=faults_of(everything),
        verdict=verdict_of(levels, arms[0].name),
    )


def show(report: "ServerReport", output_json: Path | None, console: Console) -> None:
    """The table, what failed, and the verdict on stdout."""
    from medusa_cli.bench.server_report import server_table

    shown = server_table(report)
    console.table(shown.headers, shown.rows, spare=shown.spare)
    console.say(shown.legend)
    for fault in report.faults:
        console.warn(fault)
    console.out()
    console.say(report.verdict)
    console.print_json(report.model_dump(), output_json)


def check_whole(report: "ServerReport") -> None:
    """Raise DataError where a server was gone for some of the requests; what was measured is told by then."""
    lost = sum(arm.failed.get("0", 0) for level in report.levels for arm in level.arms.values())
    if lost:
        raise DataError(f"{lost} requests were not answered at all", "look at the server's log")


def hold_gates(report: "ServerReport", asked: Asked) -> None:
    """Raise GateFailed for what was asked for and does not hold."""
    failed = []
    for level in report.levels:
        for name, ratio in level.speedup.items():
            if asked.min_speedup is not None and (ratio or 0.0) < asked.min_speedup:
                failed.append(f"{ratio or 0.0:.2f}x the tokens of {name}, asked were {asked.min_speedup:g}x")
        for name, found in level.identical.items():
            if asked.require_identical and found.same < found.of:
                failed.append(
                    f"{found.of - found.same} texts differ from those of {name} ({', '.join(found.differ[:3])})"
                )
        lost = sum(sum(arm.failed.values()) for arm in level.arms.values())
        if asked.require_identical and lost:
            failed.append(f"{lost} requests have no whole answer")
    if failed:
        raise GateFailed("; ".join(dict.fromkeys(failed)), "the table shows each level")


def _address(url: str) -> str:
    """What paths are put behind. Raises typer.BadParameter."""
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"--url {url}: write http://host:port")
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"
