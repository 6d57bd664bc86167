#!/usr/bin/env python3
"""`make bench-lookup`: requests whose next tokens are guessed beside the same without, medians of the rounds.

One server, the two kinds alternating, so that both meet the same machine. *edit* asks for a text of the prompt again, with a
change: much of the answer is in the prompt. *free* asks for a story: hardly anything is.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import statistics
import sys
from collections.abc import Callable

import bench_http
import cases
import engines
from bench_http import Server, throughput

CONCURRENT = {"c1": 1, "c8": 8, "c32": 32}
SENTENCES = 9
WHO = "The old captain|A young doctor|The tall gardener|My neighbour|The new teacher|A quiet farmer|The local baker".split("|")
DOES = "opened|painted|repaired|carried|found|sold|cleaned|watched|bought|counted".split("|")
WHAT = "the blue boat|a wooden box|seven letters|the garden gate|an old clock|two bicycles|the kitchen table".split("|")
WHERE = "near the river|behind the school|in the market|on the hill|at the station|by the lighthouse".split("|")
OUTPUT_TOKENS = 128
SINGLE_REQUESTS = 4
GUESSED = {"max_ngram_size": 3}
# Ratios of the tokens per second.
WANTED = {("edit", "c1"): 1.6, ("edit", "c8"): 1.0, ("edit", "c32"): 1.0}
# Guesses that are wrong may cost so much.
WANTED_FREE = 0.95


def arguments() -> argparse.Namespace:
    known = bench_http.parser(__doc__, list(CONCURRENT), list(CONCURRENT))
    known.add_argument("--work", nargs="+", choices=["edit", "free"], default=["edit", "free"])
    return known.parse_args()


def prompt(work: str, rng: random.Random) -> str:
    """A turn of the sample model's chat. The text is such that a small model is able to repeat it."""
    if work == "edit":
        text = " ".join(" ".join(map(rng.choice, (WHO, DOES, WHAT, WHERE))) + "." for _ in range(SENTENCES))
        asked = f"Repeat the following text word for word, with the number {rng.randrange(1000)} at its end.\n\n{text}"
    else:
        asked = f"Write a story in which {rng.choice(WHO).lower()} is {rng.choice(WHERE)}, number {rng.randrange(1000)}."
    return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"


def requests(work: str, concurrent: int, seed: int) -> list[dict]:
    """Other prompts with another seed, so that none is in the cache."""
    rng = random.Random(f"{work} {concurrent} {seed}")
    count = SINGLE_REQUESTS if concurrent == 1 else concurrent
    arrivals = [cases.after(index, OUTPUT_TOKENS) if concurrent == 1 else None for index in range(count)]
    made = [cases.request([], OUTPUT_TOKENS, arrival) for arrival in arrivals]
    return [request | {"prompt": prompt(work, rng)} for request in made]


def rounds_of(port: int, args: argparse.Namespace, work: str, case: str) -> list[tuple[float, float]]:
    """Figures of each round, guessed and plain, in an order that turns, with the same prompts."""
    measured = []
    for seed in range(args.rounds):
        figures = {}
        order = ["guessed", "plain"] if seed % 2 else ["plain", "guessed"]
        for name in order:
            # A salt of its own: nothing is found in the cache.
            more = {"cache_salt": f"{work} {case} {seed} {name}"} | (GUESSED if name == "guessed" else {})
            figures[name] = throughput(port, requests(work, CONCURRENT[case], seed), more)
            note = f"  {work} {case:4} round {seed + 1}  {name:8} {figures[name]:8.1f} tok/s"
            print(note, file=sys.stderr, flush=True)
        measured.append((figures["guessed"], figures["plain"]))
    return measured


def print_ratios(names: tuple[str, str], measured: dict, wanted_of: Callable[[tuple[str, str]], float]) -> bool:
    """Medians of what two contenders have measured, by work and case, and whether all ratios are as wanted."""
    print(f"| work | {names[0]} | {names[1]} | ratio | wanted |\n|---|---|---|---|---|")
    all_good = True
    for (work, case), figures in measured.items():
        ours, theirs = (statistics.median(column) for column in zip(*figures, strict=True))
        ratio = statistics.median(ours / theirs for ours, theirs in figures)
        wanted = wanted_of((work, case))
        all_good &= ratio >= wanted
        mark = "✓" if ratio >= wanted else "✗"
        title = f"{work}, {CONCURRENT[case]} concurrent"
        print(f"| {title} | {ours:.0f} tok/s | {theirs:.0f} tok/s | **{ratio:.2f}** | ≥ {wanted} {mark} |")
    return all_good


def main() -> None:
    args = arguments()
    setup = bench_http.setup_of(args)
    measured = {}
    with engines.scratch() as folder, Server(args.server, setup, pathlib.Path(folder)) as server:
        for more in ({}, GUESSED):
            throughput(server.port, requests("edit", 8, 99), more)
        for work in args.work:
            for case in args.cases:
                measured[work, case] = rounds_of(server.port, args, work, case)
    kept = {" ".join(key): figures for key, figures in measured.items()}
    (engines.WORK / "bench-lookup.json").write_text(json.dumps(kept, indent=1))
    print(f"{engines.versions()}\n{engines.machine()}\n")
    all_good = print_ratios(("guessed", "plain"), measured, lambda key: WANTED.get(key, WANTED_FREE))
    if args.strict and not all_good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
