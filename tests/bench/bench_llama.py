#!/usr/bin/env python3
"""`make bench-llama`: compares the server with llama.cpp's server over HTTP, in alternating runs (medians of the
rounds).

The same client sends the same prompts, as token IDs, to both servers, with greedy sampling and `ignore_eos`. llama.cpp
has one slot per concurrent request. Separate columns show its results with the same file and with the model in Q4_0,
its fastest format.
"""

from __future__ import annotations

import argparse
import collections.abc
import dataclasses
import pathlib
import statistics
import subprocess
import sys

import engines
from bench_http import Server, free_ports, over_http, parser, setup_of
from cases import CASES, Case, medians, scenario

BINARIES = engines.ROOT / ".deps" / "llama" / "build" / "bin"
# An upper bound for the total number of tokens of a prompt and its response.
SLOT_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class Contender:
    """A server in the comparison."""

    name: str
    # Returns the class of the server for a case, and the settings with which it runs.
    serve: collections.abc.Callable[[Case, engines.Setup], tuple[type[Server], engines.Setup]]


OURS = Contender("ovfleet", lambda _case, setup: (Server, setup))


class Llama(Server):
    """Starts llama.cpp's server."""

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


def with_slots(case: Case) -> type[Llama]:
    """Returns a class that starts llama.cpp's server with one slot per concurrent request of the case."""
    return type("Slots", (Llama,), {"slots": case.concurrent})


def in_q4_0(model: pathlib.Path) -> pathlib.Path:
    """Returns the file of the model in Q4_0, and creates the file if it does not exist."""
    path = engines.WORK / f"{model.stem}.requantized-Q4_0.gguf"
    if not path.is_file():
        part = path.with_suffix(".part")
        command = [BINARIES / "llama-quantize", "--allow-requantize", model, part, "Q4_0"]
        subprocess.run(command, check=True, capture_output=True)
        part.rename(path)
    return path


def one_round(
    args: argparse.Namespace, contenders: list[Contender], case: Case, seed: int, directory: pathlib.Path
) -> dict[str, dict]:
    """Runs each server once, in an order that rotates from round to round."""
    setup = setup_of(args)
    work = scenario(case, seed, args.vocabulary)
    first = seed % len(contenders)
    width = max(len(contender.name) for contender in contenders)
    measured = {}
    for contender in contenders[first:] + contenders[:first]:
        kind, changed = contender.serve(case, setup)
        measured[contender.name] = run = over_http(args.server, changed, work, directory, kind)
        note = f"  {case.name:4} round {seed + 1}  {contender.name:{width}} {run['tokens_per_second']:8.1f} tok/s"
        print(note, file=sys.stderr, flush=True)
    return measured


def row_of(case: Case, contenders: list[Contender], rounds: list[dict[str, dict]]) -> tuple[str, bool]:
    """Returns a row of the table, and whether our server is the fastest."""
    ours, *peers = (medians([each[contender.name] for each in rounds]) for contender in contenders)
    ratios = [
        statistics.median(
            each[OURS.name]["tokens_per_second"] / each[peer.name]["tokens_per_second"] for each in rounds
        )
        for peer in contenders[1:]
    ]
    cells = [case.title, f"{ours['tokens_per_second']:.0f} tok/s"]
    for peer, ratio in zip(peers, ratios):
        cells += [f"{peer['tokens_per_second']:.0f} tok/s", f"**{ratio:.2f}**"]
    cells.append(" / ".join(f"{each['first_token_p50'] * 1000:.0f}" for each in (ours, *peers)))
    return f"| {' | '.join(cells)} |", min(ratios) > 1


def beside(doc: str, version: str, *peers: Contender) -> None:
    """Compares our server with peers of the given version, and prints the table."""
    contenders = [OURS, *peers]
    names = [case.name for case in CASES if case.concurrent]
    args = parser(doc, names, names).parse_args()
    measured: dict[str, list[dict]] = {}
    with engines.scratch() as directory:
        for seed in range(args.rounds):
            for case in CASES:
                if case.name in args.cases:
                    rounds = measured.setdefault(case.name, [])
                    rounds.append(one_round(args, contenders, case, seed, pathlib.Path(directory)))
    print(f"{engines.versions()}, {version}\n{engines.machine()}\n")
    heads = ["case", OURS.name]
    for peer in peers:
        heads += [peer.name, "ratio"]
    heads.append(f"first token p50, ms: {' / '.join(contender.name for contender in contenders)}")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    rows = [row_of(case, contenders, measured[case.name]) for case in CASES if case.name in measured]
    for row, _ in rows:
        print(row)
    if args.strict and not all(is_ahead for _, is_ahead in rows):
        raise SystemExit(1)


def main() -> None:
    beside(
        __doc__,
        # llama.sh writes the name, version and hash of the Python package to this file.
        (engines.DEPS / "llama" / ".stamp").read_text().split()[0].replace("==", " "),
        Contender("llama.cpp", lambda case, setup: (with_slots(case), setup)),
        Contender("llama.cpp Q4_0", lambda case, setup: (with_slots(case), setup.with_model(in_q4_0(setup.model)))),
    )


if __name__ == "__main__":
    main()
