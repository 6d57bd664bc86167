#!/usr/bin/env python3
"""`make bench-spill`: measures the time to the first token of a long prompt that is computed, restored from disk, or cached.

The KV cache of the server has room for less than two prompts of the default length; evicted blocks are stored in a
directory. A round sends a new prompt, then two other prompts, which evict the first one, and then the first prompt
twice. After the rounds, the first prompt of each round is sent again, each time to a new server.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import random
import re
import statistics
import sys

import bench_http
import engines
import http_load
from bench_http import MODEL, Server

KV_CACHE_MIB = 32
WAYS = ["computed", "from disk", "cached", "after a restart"]


class Keeping(Server):
    """Starts a server that has a small KV cache and stores evicted blocks on disk."""

    def __init__(self, args: argparse.Namespace, directory: pathlib.Path):
        super().__init__(args.server, bench_http.setup_of(args), directory)
        self.directory = directory

    def command(self) -> list[str]:
        command = [part for part in super().command() if not part.startswith("--kv-cache-size")]
        return [*command, f"--kv-cache-size={KV_CACHE_MIB}MiB", f"--kv-spill-dir={self.directory / 'spill'}"]

    def ready(self) -> bool:
        """Whether the server is ready and has also listed its stored blocks, which it does in the background."""
        return super().ready() and "opened the directory for evicted blocks" in self.log.read_text()


def prompt(args: argparse.Namespace, seed: int) -> list[int]:
    """Returns a random prompt, which shares no prefix with those of other seeds."""
    rng = random.Random(seed)
    return [rng.randrange(1000, args.vocabulary) for _ in range(args.tokens)]


def ask(server: Server, tokens: list[int]) -> tuple[float, int]:
    """Returns the time to the first token in milliseconds, and the number of cached prompt tokens."""
    request = {"prompt": tokens, "max_tokens": 4}
    stream = asyncio.run(http_load.send(server.port, http_load.message(server.port, MODEL, request)))
    cached = re.findall(rb'"cached_tokens":\s*(\d+)', stream.tail)
    return (stream.first - stream.sent) * 1000, int(cached[-1]) if cached else 0


def warm(server: Server, args: argparse.Namespace) -> None:
    """Sends another prompt twice, because the first run with a given number of tokens is slower."""
    for _ in range(2):
        ask(server, prompt(args, 9000))


def expect(way: str, measured: tuple[float, int], args: argparse.Namespace) -> float:
    """Checks the number of cached tokens, and returns the time to the first token."""
    milliseconds, cached = measured
    if (way == "computed") != (cached < args.tokens // 2):
        raise engines.Failed(f"{way}: {cached} of {args.tokens} tokens were cached")
    print(f"  {way:16} {milliseconds:8.0f} ms  {cached} cached", file=sys.stderr, flush=True)
    return milliseconds


def main() -> None:
    known = bench_http.parser(__doc__, [], [])
    known.add_argument("--tokens", type=int, default=1500, help="number of tokens of a prompt")
    args = known.parse_args()
    measured: dict[str, list[float]] = {way: [] for way in WAYS}
    with engines.scratch() as directory:
        directory = pathlib.Path(directory)
        with Keeping(args, directory) as server:
            warm(server, args)
            for seed in range(args.rounds):
                for way in WAYS[:3]:
                    measured[way].append(expect(way, ask(server, prompt(args, seed)), args))
                    if way == "computed":
                        for other in (1, 2):
                            ask(server, prompt(args, 1000 * other + seed))
        for seed in range(args.rounds):
            with Keeping(args, directory) as server:
                warm(server, args)
                measured[WAYS[3]].append(expect(WAYS[3], ask(server, prompt(args, seed)), args))
    print(f"{engines.versions()}\n{engines.machine()}\n")
    print(f"{args.tokens} tokens, medians of {args.rounds}\n\n| | first token | ratio to computing it |\n|---|---|---|")
    computed = measured["computed"]
    for way in WAYS:
        ratio = statistics.median(time / first for time, first in zip(measured[way], computed, strict=True))
        print(f"| {way} | {statistics.median(measured[way]):.0f} ms | {ratio:.2f} |")


if __name__ == "__main__":
    main()
