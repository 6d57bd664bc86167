#!/usr/bin/env python3
"""`make bench-http`: compares the server over HTTP with the engine in process, in alternating runs (medians of the
rounds).

Both use the same prompts, concurrency and engine settings. The server is started for each run and stopped after it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request

import cases
import engines
import http_load
from cases import CASES, Case, measure, scenario

SERVER = engines.ROOT / "target" / "release" / "ovfleet-server"
MODEL = "bench"
WANTED = 0.93
READY_SECONDS_MAX = STOP_SECONDS_MAX = 120


def parser(doc: str, names: list[str], default: list[str]) -> argparse.ArgumentParser:
    """Returns a parser of the arguments that the benchmarks of servers share: the cases and the settings of a run."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=pathlib.Path, default=SERVER)
    parser.add_argument("--model", type=pathlib.Path, default=engines.SAMPLE)
    parser.add_argument("--cases", nargs="+", choices=names, default=default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--inference-precision", default=engines.served_precision())
    parser.add_argument("--kv-cache-precision", default="u8")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--max-chunk-tokens", type=int, default=128)
    parser.add_argument("--strict", action="store_true", help="exit with status 1 if a ratio misses its target")
    return parser


def throughput(port: int, requests: list[dict], more: dict) -> float:
    """Sends the requests with the additional parameters `more`, and returns the generated tokens per second."""
    result = asyncio.run(http_load.load(port, MODEL, [request | {"more": more} for request in requests]))
    wanted = sum(request["max_tokens"] for request in requests)
    if result["output_tokens"] != wanted:
        raise engines.Failed(f"the server returned {result['output_tokens']} tokens instead of {wanted}")
    return wanted / result["seconds"]


def setup_of(args: argparse.Namespace) -> engines.Setup:
    """Returns the settings of a run, and exits if the server has not been built."""
    if not args.server.is_file():
        raise SystemExit(f"{args.server} does not exist: build it with `cargo build --release --package server`")
    return engines.Setup(
        args.model,
        inference_precision=args.inference_precision,
        kv_cache_precision=args.kv_cache_precision,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_chunk_tokens=args.max_chunk_tokens,
        prefix_caching=True,
    )


def arguments() -> argparse.Namespace:
    names = [case.name for case in CASES if case.concurrent]
    known = parser(__doc__, names, names)
    known.add_argument("--engine", help="the engine-bench binary")
    return known.parse_args()


class Server:
    """A server process. The `with` statement starts it, waits until it is ready, and stops it at the end."""

    health = "/v2/health/ready"

    def __init__(self, binary: pathlib.Path, setup: engines.Setup, directory: pathlib.Path):
        self.binary, self.setup = binary, setup
        self.log = directory / "server.log"

    def command(self) -> list[str]:
        """Chooses free ports, and returns the server's command line, with the settings that the server and the engine
        have in common."""
        self.port, grpc_port = free_ports(2)
        setup = self.setup
        return [
            str(self.binary),
            f"--model={setup.model}",
            f"--model-name={MODEL}",
            f"--port={self.port}",
            f"--grpc-port={grpc_port}",
            f"--kv-cache-size={setup.kv_cache_gib}GiB",
            f"--max-num-batched-tokens={setup.max_num_batched_tokens}",
            f"--max-chunk-tokens={setup.max_chunk_tokens}",
            f"--plugin-config=INFERENCE_PRECISION_HINT={setup.inference_precision}",
            f"--kv-cache-precision={setup.kv_cache_precision}",
            f"--plugin-config=INFERENCE_NUM_THREADS={setup.threads}",
            *(f"--plugin-config={one}" for one in setup.properties),
        ]

    def __enter__(self) -> Server:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OVFLEET_")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(self.command(), env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + READY_SECONDS_MAX
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise engines.Failed(f"the server did not become ready: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)
        return self

    def ready(self) -> bool:
        """Whether the server responds and is ready."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{self.health}", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def __exit__(self, *_exception) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def free_ports(count: int) -> list[int]:
    """Returns free ports."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def over_http(
    server: pathlib.Path, setup: engines.Setup, work: dict, directory: pathlib.Path, kind: type[Server] = Server
) -> dict:
    """Runs a scenario over HTTP on a new server."""
    with kind(server, setup, directory) as running:
        asyncio.run(http_load.load(running.port, MODEL, work["warmup"]))
        result = asyncio.run(http_load.load(running.port, MODEL, work["requests"]))
    wanted = sum(request["max_tokens"] for request in work["requests"])
    if result["output_tokens"] != wanted:
        raise engines.Failed(f"the server returned {result['output_tokens']} tokens instead of {wanted}")
    return result | {"tokens_per_second": wanted / result["seconds"]}


def one_round(args: argparse.Namespace, case: Case, seed: int, directory: pathlib.Path) -> dict[str, dict]:
    """Runs a case once in process and once over HTTP, in an order that alternates from round to round."""
    setup = setup_of(args)
    engine = engines.find_engine(args.engine)
    work = scenario(case, seed, args.vocabulary)
    runs = [
        ("in process", lambda: measure(case, engines.run_engine(engine, setup, work, directory))),
        ("http", lambda: over_http(args.server, setup, work, directory)),
    ]
    measured = {}
    for name, run in runs if seed % 2 else reversed(runs):
        measured[name] = run()
        note = f"  {case.name:4} round {seed + 1}  {name:10} {measured[name]['tokens_per_second']:8.1f} tok/s"
        print(note, file=sys.stderr, flush=True)
    return measured


HEAD = (
    "| case | over HTTP | in process | ratio | target | first token p50, ms: HTTP / in process |\n"
    "|---|---|---|---|---|---|"
)


def row_of(case: Case, rounds: list[dict]) -> tuple[str, bool]:
    """Returns a row of the table, and whether the ratio meets the target."""
    http, inside = (cases.medians([each[way] for each in rounds]) for way in ("http", "in process"))
    ratios = [each["http"]["tokens_per_second"] / each["in process"]["tokens_per_second"] for each in rounds]
    ratio = statistics.median(ratios)
    good = ratio >= WANTED
    waits = " / ".join(f"{way['first_token_p50'] * 1000:.0f}" for way in (http, inside))
    row = (
        f"| {case.title} | {http['tokens_per_second']:.0f} tok/s | {inside['tokens_per_second']:.0f} tok/s "
        f"| **{ratio:.2f}** | ≥ {WANTED} {'✓' if good else '✗'} | {waits} |"
    )
    return row, good


def main() -> None:
    args = arguments()
    measured: dict[str, list[dict]] = {}
    with engines.scratch() as directory:
        for seed in range(args.rounds):
            for case in CASES:
                if case.name in args.cases:
                    measured.setdefault(case.name, []).append(one_round(args, case, seed, pathlib.Path(directory)))
    (engines.WORK / "bench-http.json").write_text(json.dumps(measured, indent=1))
    print(f"{engines.versions()}\n{engines.machine()}")
    print(f"the client alone: {asyncio.run(http_load.measure_itself()):.0f} events/s\n\n{HEAD}")
    rows = [row_of(case, measured[case.name]) for case in CASES if case.name in measured]
    for row, _ in rows:
        print(row)
    if args.strict and not all(good for _, good in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
