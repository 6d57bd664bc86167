#!/usr/bin/env python3
"""`make soak`: runs a mixed load against one server and checks for leaks, changed results and stuck requests.

Clients send many kinds of requests concurrently: chats, streams that they abort, several choices, beams, structured
outputs, speculative decoding, long prompts and invalid input. The KV cache is too small for all of them, so sequences
are preempted. Memory, threads and open files are sampled. At the end, no request may be running, no block may be in
use, and a fixed request must have the same response as before the load. The memory usage in the last fifth of the run
must not exceed that in the second fifth by more than 5 percent.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import pathlib
import random
import re
import statistics
import threading
import time
import urllib.request

import engines
from bench_http import MODEL, SERVER, Server

CLIENTS = 12
# The time limit for a response.
ANSWER_SECONDS_MAX = 180
SAMPLE_SECONDS = 5
# The maximum ratio of the median memory in the last fifth of the run to that in the second fifth.
GROWTH_MAX = 1.05
KV_CACHE_MIB = 48
WORDS = "the cache holds blocks of tokens and each sequence writes its own while others read what is shared".split()
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


class Small(Server):
    """Starts a server with a small KV cache."""

    def command(self) -> list[str]:
        command = [part for part in super().command() if not part.startswith("--kv-cache-size")]
        return [*command, f"--kv-cache-size={KV_CACHE_MIB}MiB", "--max-num-seqs=16"]


def text(rng: random.Random, words: int) -> str:
    """Returns a text with this number of words."""
    return " ".join(rng.choice(WORDS) for _ in range(words))


def bodies(rng: random.Random) -> tuple[str, str, dict, set[int], bool]:
    """Returns a random request: its kind, path and body, the expected statuses, and whether the client disconnects early."""
    kind = rng.choice(["chat", "stream", "leave", "choices", "beams", "form", "guesses", "long", "nonsense", "scores"])
    ask = [{"role": "user", "content": text(rng, rng.randrange(5, 120))}]
    chat = {"model": MODEL, "messages": ask, "max_tokens": rng.randrange(4, 64), "temperature": rng.choice([0, 1])}
    more = {
        "stream": {"stream": True},
        "leave": {"stream": True, "max_tokens": 200, "ignore_eos": True},
        "choices": {"n": 3},
        "beams": {"use_beam_search": True, "best_of": 3, "max_tokens": 16},
        "form": {"response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}},
        "guesses": {"max_ngram_size": 3, "num_assistant_tokens": 5},
        "long": {"messages": [{"role": "user", "content": text(rng, 1500)}]},
        "nonsense": {rng.choice(["temperature", "n", "seed", "max_tokens"]): rng.choice(["x", -1.5, [[]]])},
    }
    right = {400} if kind == "nonsense" else {200, 429}
    if kind == "scores":
        body = {"model": MODEL, "prompt": text(rng, 60), "max_tokens": 2, "echo": True, "logprobs": 2}
        return kind, "/v1/completions", body, right, False
    return kind, "/v1/chat/completions", chat | more.get(kind, {}), right, kind == "leave"


class Clients:
    """Client threads that send requests until they are stopped, and their results."""

    def __init__(self, port: int, count: int):
        self.port, self.stop = port, threading.Event()
        self.answers: dict[str, int] = {}
        self.longest, self.wrong = 0.0, []
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self.run, args=(seed,)) for seed in range(count)]
        for thread in self.threads:
            thread.start()

    def run(self, seed: int) -> None:
        """Runs one client."""
        rng = random.Random(seed)
        while not self.stop.is_set():
            kind, path, body, right, leaves = bodies(rng)
            began = time.monotonic()
            try:
                status = ask(self.port, path, body, 700 if leaves else None)
            except (OSError, http.client.HTTPException) as error:
                status = repr(error)
            took = time.monotonic() - began
            with self.lock:
                self.answers[kind] = self.answers.get(kind, 0) + 1
                self.longest = max(self.longest, took)
                if status not in right:
                    self.wrong.append(f"{kind}: {status}")
                    self.stop.set()

    def join(self) -> None:
        """Stops the clients."""
        self.stop.set()
        for thread in self.threads:
            thread.join()


def ask(port: int, path: str, body: dict, bytes_max: int | None = None) -> int:
    """Sends a request, reads at most `bytes_max` bytes of the response (None: all), and returns the status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS_MAX)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read(bytes_max)
        return answer.status
    finally:
        connection.close()


def probe(port: int) -> str:
    """Returns the text of the response to a fixed request."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": MODEL, "messages": question, "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS_MAX) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def metrics(port: int) -> dict[str, float]:
    """Returns the metrics of the server, summed over their labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    sums: dict[str, float] = {}
    for line in lines:
        if match := re.match(r"(\w+)(?:\{[^}]*\})? (\S+)", line):
            sums[match[1]] = sums.get(match[1], 0.0) + float(match[2])
    return sums


@dataclasses.dataclass
class Sample:
    """The memory, threads and open files of a process."""

    memory_bytes: int
    threads: int
    files: int

    @classmethod
    def of(cls, process: int) -> Sample:
        """Takes a sample of the process."""
        status = pathlib.Path(f"/proc/{process}/status").read_text()
        memory = int(re.search(r"VmRSS:\s*(\d+)", status).group(1)) * 1024
        threads = int(re.search(r"Threads:\s*(\d+)", status).group(1))
        return cls(memory, threads, len(list(pathlib.Path(f"/proc/{process}/fd").iterdir())))


def idle(port: int) -> dict[str, float]:
    """Waits until all requests have ended, and returns the metrics."""
    deadline = time.monotonic() + ANSWER_SECONDS_MAX
    while True:
        now = metrics(port)
        busy = [name for name in ("requests_in_flight", "sequences_running", "sequences_waiting", "blocks_active")
                if now.get(f"ovfleet_server_{name}") != 0]
        if not busy:
            return now
        if time.monotonic() > deadline:
            raise SystemExit(f"metrics still not zero {ANSWER_SECONDS_MAX} s after the load: {', '.join(busy)}")
        time.sleep(0.2)


def soak(server: Small, minutes: float) -> list[str]:
    """Runs the load on the server, and returns the problems."""
    before = probe(server.port)
    samples, tokens = [], []
    clients = Clients(server.port, CLIENTS)
    began = time.monotonic()
    end = began + minutes * 60
    while time.monotonic() < end and not clients.stop.is_set():
        clients.stop.wait(SAMPLE_SECONDS)
        samples.append(Sample.of(server.process.pid))
        tokens.append(metrics(server.port)["ovfleet_server_generated_tokens_total"])
    lasted = (time.monotonic() - began) / 60
    clients.join()
    after = idle(server.port)
    wrong = list(clients.wrong)
    if probe(server.port) != before:
        wrong.append(f"the response to the same request changed; before the load it was {before!r}")
    fifth = max(1, len(samples) // 5)
    early, late = (statistics.median(one.memory_bytes for one in part) for part in (samples[fifth : 2 * fifth], samples[-fifth:]))
    if late > early * GROWTH_MAX:
        wrong.append(f"memory grew from {early / 2**20:.0f} to {late / 2**20:.0f} MiB")
    rates = [(part[-1] - part[0]) / (SAMPLE_SECONDS * max(1, len(part) - 1)) for part in (tokens[fifth : 2 * fifth], tokens[-fifth:])]
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(clients.answers.items()))
    print(f"{sum(clients.answers.values())} requests in {lasted:.0f} minutes: {kinds}")
    print(f"longest response {clients.longest:.1f} s; {after['ovfleet_server_preemptions_total']:.0f} preemptions")
    print(f"memory {early / 2**20:.0f} MiB in the second fifth, {late / 2**20:.0f} in the last; "
          f"threads {samples[fifth].threads} and {samples[-1].threads}, files {samples[fifth].files} and {samples[-1].files} "
          f"while loaded; tokens/s {rates[0]:.0f} and {rates[1]:.0f}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--server", type=pathlib.Path, default=SERVER)
    parser.add_argument("--model", type=pathlib.Path, default=engines.SAMPLE)
    args = parser.parse_args()
    setup = engines.Setup(
        args.model,
        inference_precision=engines.served_precision(),
        kv_cache_precision="u8",
        max_num_batched_tokens=512,
        max_chunk_tokens=128,
        prefix_caching=True,
    )
    with engines.scratch() as directory, Small(args.server, setup, pathlib.Path(directory)) as server:
        wrong = soak(server, args.minutes)
    for line in wrong:
        print(f"WRONG: {line}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
