"""Time to first token of a prompt with a long beginning: cold, out of memory, and out of Redis in a fresh process.

`python -m tests.serve_prefix [-m MODEL] [--tokens 1000] [--rounds 5]` starts `medusa serve` as users do, and a Redis.
Each round: a server that has read nothing (cold), the same one again (memory), another process (Redis).
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from tests.prefix.redis_server import RedisServer
from tests.serve_process import serve_process

WORDS = ["river", "stone", "letter", "garden", "window", "morning", "paper", "silver", "market", "winter", "copper"]


@contextmanager
def _begun(client: httpx.Client, url: str, asked: dict[str, Any]) -> Iterator[tuple[float, httpx.Response]]:
    began = time.perf_counter()
    with client.stream("POST", f"{url}/v1/chat/completions", json=asked) as answer:
        yield began, answer


def first_token(url: str, system: str, question: str) -> tuple[float, int, str]:
    """Seconds until the first token, tokens that were not read, and the text."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    asked: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 16, "stream": True}
    asked |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
    first, text, cached = 0.0, "", 0
    # a client is made before the clock runs: its certificates take a third of a second
    with httpx.Client(timeout=600) as client, _begun(client, url, asked) as (began, answer):
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
            words = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            # the first event comes with the first token, which may be one that doesn't show
            first = first or time.perf_counter() - began
            text += words
    return first, cached, text


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    found: dict[str, list[float]] = {"cold": [], "memory": [], "redis": []}
    with TemporaryDirectory() as folder, RedisServer(Path(folder)) as redis:
        pool = f"memory:1GB,{redis.url}"
        with serve_process("-m", given.model, "--prefix-pool", pool) as one:
            first_token(one.url, "", "Hello")  # kernels and costs are there
            texts = []
            for number in range(given.rounds):
                system = " ".join(random.Random(number).choices(WORDS, k=given.tokens))
                cold, cached, text = first_token(one.url, system, "Which words do you see?")
                assert cached < 64
                warm, cached, again = first_token(one.url, system, "Which words do you see?")
                assert cached > given.tokens * 0.9
                assert text == again
                texts.append((system, text))
                found["cold"].append(cold)
                found["memory"].append(warm)
            time.sleep(3)  # chunks are stored behind the reply
        with serve_process("-m", given.model, "--prefix-pool", pool) as two:
            first_token(two.url, "", "Hello")
            for system, text in texts:
                warm, cached, again = first_token(two.url, system, "Which words do you see?")
                assert cached > given.tokens * 0.9, cached
                assert text == again
                found["redis"].append(warm)
        used = redis.client.info("memory")["used_memory"] / 2**20
    cold = statistics.median(found["cold"])
    for name, times in found.items():
        median = statistics.median(times)
        print(f"{name:7} median {median:.3f} s ({min(times):.3f} to {max(times):.3f}), {median / cold:.3f} of cold")
    print(f"Redis holds {used:.0f} MiB")


if __name__ == "__main__":
    main()
