"""Many clients at once for minutes against `medusa serve`: no wrong text, none lost, memory flat.

    python -m tests.serve_soak --clients 200 --minutes 10 [-m smollm2-135m] [--max-num-seqs 8]

Starts the server as users do. First, each of the different requests is sent alone and without guesses. Then many
clients send them in loops: streamed and whole, greedy and seeded, with stops, with several texts. Some read slowly,
some leave in the middle. Every whole answer is compared; 429 is asked again, as a client does. The memory of the
server's process is read all the while.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.serve_process import serve_process

TOPICS = [
    "rivers",
    "a broken clock",
    "bread",
    "the moon",
    "old bridges",
    "bees",
    "winter",
    "a lost letter",
    "maps",
    "tea",
]
TASKS = ["Write one sentence about {}.", "List three words about {}.", "Ask a question about {}.", "Rhyme about {}:"]
VANISH, SLOW = 0.05, 0.05  # shares of the requests that leave in the middle, and that read slowly


def requests_of(num_new: int) -> list[dict[str, Any]]:
    """The different requests."""
    found = []
    for number, topic in enumerate(TOPICS):
        for place, task in enumerate(TASKS):
            document: dict[str, Any] = {
                "messages": [{"role": "user", "content": task.format(topic)}],
                "max_tokens": 4 + (7 * number + 5 * place) % num_new,
                "temperature": 0,
            }
            kind = (number + place) % 5
            if kind == 1:
                document |= {"temperature": 0.8, "top_p": 0.9, "seed": number}
            elif kind == 2:
                document |= {"stop": [".", "\n"]}
            elif kind == 3:
                document |= {"n": 2, "temperature": 1.0, "seed": 100 + number}
            found.append(document)
    return found


@dataclass
class Tally:
    """What became of all requests."""

    answers: Counter[str] = field(default_factory=Counter)
    whole_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


async def texts_of(
    client: httpx.AsyncClient,
    document: dict[str, Any],
    tally: Tally | None = None,
    pause: float = 0.0,
    leave: bool = False,
) -> list[str] | None:
    """The texts of one request; None where the client left."""
    began = time.perf_counter()
    if not document.get("stream"):
        answer = await client.post("/v1/chat/completions", json=document)
        answer.raise_for_status()
        return [choice["message"]["content"] for choice in answer.json()["choices"]]
    texts, is_whole, events = [""] * document.get("n", 1), False, 0
    async with client.stream("POST", "/v1/chat/completions", json=document) as answer:
        if answer.status_code != 200:
            await answer.aread()
            answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                is_whole = True
            if not line.startswith("data: {"):
                continue
            events += 1
            if events == 1 and tally is not None:
                tally.first_s.append(time.perf_counter() - began)
            if leave and events == 2:
                return None
            await asyncio.sleep(pause)
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
    assert is_whole, "a stream ended before its texts did"
    return texts


async def one_client(
    client: httpx.AsyncClient,
    asked: list[dict[str, Any]],
    wanted: list[list[str]],
    ends: float,
    tally: Tally,
    rng: random.Random,
) -> None:
    """Ask in a loop until the time is over."""
    while time.monotonic() < ends:
        which = rng.randrange(len(asked))
        leaves = rng.random() < VANISH
        document = asked[which] | {"stream": leaves or rng.random() < 0.5}
        began = time.perf_counter()
        try:
            pause = rng.uniform(0.02, 0.3) if rng.random() < SLOW else 0.0
            found = await texts_of(client, document, tally, pause, leaves)
        except httpx.HTTPStatusError as error:
            tally.answers[str(error.response.status_code)] += 1
            if error.response.status_code != 429:
                tally.wrong.append(error.response.text[:300])
            await asyncio.sleep(rng.uniform(0.5, 1.5) * float(error.response.headers.get("Retry-After", "1")))
            continue
        except (httpx.HTTPError, AssertionError) as error:
            tally.answers["lost"] += 1
            tally.wrong.append(f"{type(error).__name__}: {error}")
            continue
        if found is None:
            tally.answers["left"] += 1
            continue
        tally.whole_s.append(time.perf_counter() - began)
        tally.answers["right" if found == wanted[which] else "wrong"] += 1
        if found != wanted[which]:
            tally.wrong.append(f"{document}: {found} instead of {wanted[which]}")


async def watch(pid: int, ends: float, tally: Tally) -> None:
    """Read the server's memory, in MiB."""
    while time.monotonic() < ends:
        words = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
        tally.memory.append(int(words[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)
        await asyncio.sleep(2)


async def soak(url: str, pid: int, given: argparse.Namespace) -> Tally:
    """All of it."""
    asked, tally = requests_of(given.max_new_tokens), Tally()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=given.clients)
    async with httpx.AsyncClient(base_url=url, timeout=900, limits=limits) as client:
        wanted = []
        for document in asked:
            found = await texts_of(client, document | {"speculate": False})
            assert found is not None
            wanted.append(found)
        print(f"{len(asked)} requests alone are done", file=sys.stderr, flush=True)
        ends = time.monotonic() + 60 * given.minutes
        clients = [
            one_client(client, asked, wanted, ends, tally, random.Random(number)) for number in range(given.clients)
        ]
        await asyncio.gather(*clients, watch(pid, ends, tally))
        left = (await client.get("/metrics")).text
        for name in ("medusa:num_requests_running", "medusa:num_requests_waiting"):
            value = next(float(line.split()[-1]) for line in left.splitlines() if line.startswith(f"{name} "))
            if value:
                tally.wrong.append(f"{name} is {value:g} when everybody has gone")
    return tally


def main() -> None:
    """Run, print, and end with 1 where a text is wrong or lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--max-queue", type=int, default=256)
    parser.add_argument("-n", "--max-new-tokens", type=int, default=24)
    given = parser.parse_args()
    flags = ("-m", given.model, "--max-num-seqs", given.max_num_seqs, "--max-queue", given.max_queue)
    with serve_process(*flags) as served:
        tally = asyncio.run(soak(served.url, served.pid, given))
    print(dict(tally.answers))
    for name, seconds in (("to the first words", tally.first_s), ("whole", tally.whole_s)):
        order = sorted(seconds)
        print(f"{name}: p50 {order[len(order) // 2]:.2f} s, p99 {order[int(0.99 * len(order))]:.2f} s of {len(order)}")
    tenth = max(1, len(tally.memory) // 10)
    print(
        f"memory MiB: {statistics.median(tally.memory[:tenth]):.0f} in the first tenth, "
        f"{statistics.median(tally.memory[-tenth:]):.0f} in the last, at most {max(tally.memory):.0f}"
    )
    for fault in tally.wrong[:20]:
        print("fault:", fault)
    sys.exit(bool(tally.wrong))


if __name__ == "__main__":
    main()
