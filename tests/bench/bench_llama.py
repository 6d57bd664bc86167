#!/usr/bin/env python3
"""`make bench-llama`: our server beside llama.cpp's, both over HTTP, alternating, medians of the rounds.

The same prompts of tokens by the same client, greedy, end tokens ignored. llama.cpp has as many slots as there are requests at
once. It serves the same file, and in rows of their own the same model in Q4_0, which is its fastest form and another model.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import subprocess
import sys

import engines
from bench_http import Server, free_ports, over_http, parser, setup_of
from cases import CASES, Case, scenario

BINARIES = engines.ROOT / ".deps" / "llama" / "build" / "bin"
# Tokens of a prompt and its answer, with room for more.
SLOT_TOKENS = 512
NAMES = ["ovfleet", "llama.cpp", "llama.cpp Q4_0"]


class Llama(Server):
    """llama.cpp's server."""

    health = "/health"
    slots = 1

    def command(self) -> list[str]:
        (self.port,) = free_ports(1)
        setup = self.setup
        options = {
            "--model": setup.model,
            "--port": self.port,
            "--ctx-size": self.slots * SLOT_TOKENS,
            "--parallel": self.slots,
            "--threads": setup.threads,
            "--threads-batch": setup.threads,
        }
        return [str(BINARIES / "llama-server"), *(str(part) for option in options.items() for part in option)]


def in_q4_0(model: pathlib.Path) -> pathlib.Path:
    """The model in Q4_0, made once."""
    path = engines.WORK / f"{model.stem}.requantised-Q4_0.gguf"
    if not path.is_file():
        part = path.with_suffix(".part")
        command = [BINARIES / "llama-quantize", "--allow-requantize", model, part, "Q4_0"]
        subprocess.run(command, check=True, capture_output=True)
        part.rename(path)
    return path


def one_round(args: argparse.Namespace, case: Case, seed: int, folder: pathlib.Path) -> dict[str, float]:
    """Each server once, in an order that turns from round to round."""
    setup = setup_of(args)
    work = scenario(case, seed, args.vocabulary)
    slots = type("Slots", (Llama,), {"slots": case.concurrent})
    runs = {
        "ovfleet": lambda: over_http(args.server, setup, work, folder),
        "llama.cpp": lambda: over_http(args.server, setup, work, folder, slots),
        "llama.cpp Q4_0": lambda: over_http(args.server, setup.with_model(in_q4_0(args.model)), work, folder, slots),
    }
    measured = {}
    for name in NAMES[seed % 3 :] + NAMES[: seed % 3]:
        measured[name] = runs[name]()["tokens_per_second"]
        print(f"  {case.name:4} round {seed + 1}  {name:14} {measured[name]:8.1f} tok/s", file=sys.stderr, flush=True)
    return measured


def main() -> None:
    names = [case.name for case in CASES if case.concurrent]
    args = parser(__doc__, names, names).parse_args()
    measured: dict[str, list[dict]] = {}
    with engines.scratch() as folder:
        for seed in range(args.rounds):
            for case in CASES:
                if case.name in args.cases:
                    measured.setdefault(case.name, []).append(one_round(args, case, seed, pathlib.Path(folder)))
    print(f"{engines.versions()}\n{engines.machine()}\n")
    print("| case | ovfleet | llama.cpp | ratio | llama.cpp, Q4_0 | ratio |\n|---|---|---|---|---|---|")
    is_ahead = True
    for case in CASES:
        if rounds := measured.get(case.name):
            ours, same, other = (statistics.median(each[name] for each in rounds) for name in NAMES)
            ratios = [statistics.median(each["ovfleet"] / each[name] for each in rounds) for name in NAMES[1:]]
            is_ahead &= min(ratios) > 1
            print(f"| {case.title} | {ours:.0f} tok/s | {same:.0f} tok/s | **{ratios[0]:.2f}** | {other:.0f} tok/s | **{ratios[1]:.2f}** |")
    if args.strict and not is_ahead:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
