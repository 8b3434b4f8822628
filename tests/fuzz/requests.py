"""Damaged requests by the thousand against a real server over a tiny model: each is answered, or refused in words.

    python -m tests.fuzz.requests --count 10000
    python -m tests.fuzz.requests --only 17        one of them again, with what is sent and answered

Fine is: 200 with a document or a whole stream, 4xx with an error object, or a connection that the server closes where
what was sent is no HTTP. A fault is 5xx, a trace, no answer within SECONDS, and another text for the good request that
is sent after every hundred. Seed and number make a request, so each can be had again.
"""

import argparse
import json
import random
import socket
import sys
import time
from collections import Counter
from typing import Any

import httpx

from tests.fuzz.mutator import mutated
from tests.serve.conftest import Served, serving

SECONDS = 20.0
CHAT, WORDS = "/v1/chat/completions", "/v1/completions"
SAY = [{"role": "system", "content": "w3"}, {"role": "user", "content": [{"type": "text", "text": "w5 w6"}]}]
SETTINGS: list[dict[str, Any]] = [
    {}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}, {"n": 3, "seed": 4},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "seed": 1},
    {"stop": ["w9", "w11"]}, {"stop": "w7"},
    {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2}, 
    {"logit_bias": {"5": 2, "9": -100}},
    {"ignore_eos": True, "user": "me", "metadata": {"a": "b"}}, {"speculate": False}, {"max_completion_tokens": 3},
    {"logprobs": True, "top_logprobs": 4, "stream": True},
]  # fmt: skip
VALID = [
    *((CHAT, {"model": "tiny", "messages": SAY, "max_tokens": 4} | each) for each in SETTINGS),
    *(
        (WORDS, {"model": "tiny", "prompt": prompt, "max_tokens": 4} | each)
        for each in SETTINGS[:11]
        for prompt in ("w5 w6", [5, 6, 7], ["w1", "w2 w3"], [[4], [5, 6]])
    ),
    (WORDS, {"prompt": "w5", "logprobs": 3, "stream": True}),
]
GOOD = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0}
HEADERS = [
    b"Content-Length: -1", b"Content-Length: 99999999999999", b"Transfer-Encoding: chunked", b"Expect: 100-continue",
    b"Content-Type: text/\xff", b"Authorization: Bearer \xff\xfe", b"X-Request-Id: a\tb", b"Content-Encoding: gzip",
    b"Host: ", b"Connection: upgrade", b"A" * 70_000 + b": 1", b": no name", b"\0: \0",
]  # fmt: skip


def request_of(number: int, seed: int) -> tuple[str, bytes, random.Random]:
    """Path, damaged body, and the random numbers that go on."""
    rng = random.Random(f"{seed} {number}")
    path, document = rng.choice(VALID)
    other = json.dumps(rng.choice(VALID)[1]).encode()
    return path, mutated(json.dumps(document).encode(), other, "json", rng), rng


def fault_of(served: Served, client: httpx.Client, number: int, seed: int, *, tell: bool = False) -> str:
    """What became of one request: a status, or what is wrong."""
    path, body, rng = request_of(number, seed)
    if tell:
        print(path, body[:2000])
    if rng.random() < 0.15:
        return _raw(served, path, body, rng)
    try:
        answer = client.post(path, content=body)
    except httpx.TimeoutException:
        return f"no answer within {SECONDS:g} s"
    if tell:
        print(answer.status_code, answer.text[:2000])
    return _judged(answer.status_code, answer.text)


def _judged(status: int, text: str) -> str:
    if "Traceback" in text or 'File "' in text:
        return "a trace in the reply"
    if status == 200:
        whole = text.rstrip().endswith("data: [DONE]") or text.startswith("{")
        return "200" if whole else "200 that is not whole"
    if 400 <= status < 500 and set(json.loads(text)["error"]) == {"message", "type", "param", "code"}:
        return str(status)
    return f"status {status}"


def _raw(served: Served, path: str, body: bytes, rng: random.Random) -> str:
    """As bytes on a connection, with a head that may be damaged too; maybe broken off in the middle."""
    port = int(served.url.rpartition(":")[2])
    lines = [f"POST {path} HTTP/1.1".encode(), b"Host: here", b"Connection: close", b"Content-Length: %d" % len(body)]
    if rng.random() < 0.7:
        lines.insert(rng.randrange(1, len(lines) + 1), rng.choice(HEADERS))
    sent = b"\r\n".join(lines) + b"\r\n\r\n" + body
    if rng.random() < 0.3:
        sent = mutated(sent, sent, "binary", rng)
    if rng.random() < 0.3:
        sent = sent[: rng.randrange(len(sent) + 1)]
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        except TimeoutError:
            return f"no answer within {SECONDS:g} s"
        except OSError:
            return "closed"
    head, _, text = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return "closed"
    status = int(head[9:12])
    if b"Traceback" in text:
        return "a trace in the reply"
    return f"status {status}" if status >= 500 else f"raw {status}"


def is_fine(found: str) -> bool:
    """Whether a request was answered as it must be."""
    return found in ("200", "closed") or found.startswith("raw ") or (found.isdigit() and found.startswith("4"))


def run(count: int, seed: int, first: int = 0) -> tuple[Counter[str], list[tuple[int, str]]]:
    """What became of so many requests: counts, and the faults by number."""
    counts: Counter[str] = Counter()
    faults: list[tuple[int, str]] = []
    with serving(max_rows=4, max_waiting=64) as served, served.client() as client:
        client.timeout = httpx.Timeout(SECONDS)
        wanted = served.post(WORDS, GOOD).json()["choices"]
        began = time.monotonic()
        for number in range(first, first + count):
            found = fault_of(served, client, number, seed)
            counts[found] += 1
            if not is_fine(found):
                faults.append((number, found))
            if number % 100 == 99 and served.post(WORDS, GOOD).json()["choices"] != wanted:
                faults.append((number, "the good request's text has changed"))
            if number % 1000 == 999:
                print(f"{number + 1} requests, {time.monotonic() - began:.0f} s, {len(faults)} faults", file=sys.stderr)
        stats = served.worker.stats()
        if (stats.rows, stats.reading, stats.waiting, served.worker.num_waiting) != (0, 0, 0, 0):
            faults.append((count, f"rows that nobody waits for: {stats}"))
    return counts, faults


def main() -> None:
    """Run, print what was found, and end with 1 where there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    given = parser.parse_args()
    if given.only is not None:
        with serving() as served, served.client() as client:
            print(fault_of(served, client, given.only, given.seed, tell=True))
        return
    counts, faults = run(given.count, given.seed)
    for found, number in counts.most_common():
        print(f"{number:7,}  {found}")
    for number, found in faults[:50]:
        print(f"--only {number}: {found}")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
