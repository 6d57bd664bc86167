#!/usr/bin/env python3
"""`make bench-lookup`: compares requests with and without n-gram speculative decoding (medians of the rounds).

Both kinds alternate on one server, so that other load on the machine affects both. *edit* requests a changed copy of a text in the
prompt, so most of the response is in the prompt. *free* requests a story, so hardly any of the response is in the prompt.
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
TITLES = {(work, case): f"{work}, {count} concurrent" for work in ("edit", "free") for case, count in CONCURRENT.items()}
SENTENCES = 9
WHO = "The old captain|A young doctor|The tall gardener|My neighbour|The new teacher|A quiet farmer|The local baker".split("|")
DOES = "opened|painted|repaired|carried|found|sold|cleaned|watched|bought|counted".split("|")
WHAT = "the blue boat|a wooden box|seven letters|the garden gate|an old clock|two bicycles|the kitchen table".split("|")
WHERE = "near the river|behind the school|in the market|on the hill|at the station|by the lighthouse".split("|")
OUTPUT_TOKENS = 128
SINGLE_REQUESTS = 4
GUESSED = {"max_ngram_size": 3}
# The target ratios of tokens per second for *edit*.
WANTED = {("edit", "c1"): 1.6, ("edit", "c8"): 1.0, ("edit", "c32"): 1.0}
# The target ratio for *free*: rejected draft tokens may cost at most 5%.
WANTED_FREE = 0.95


def arguments() -> argparse.Namespace:
    known = bench_http.parser(__doc__, list(CONCURRENT), list(CONCURRENT))
    known.add_argument("--work", nargs="+", choices=["edit", "free"], default=["edit", "free"])
    return known.parse_args()


def prompt(work: str, rng: random.Random) -> str:
    """Returns a chat turn for the sample model. For *edit*, it contains a text that a small model can repeat."""
    if work == "edit":
        text = " ".join(" ".join(map(rng.choice, (WHO, DOES, WHAT, WHERE))) + "." for _ in range(SENTENCES))
        asked = f"Repeat the following text word for word, with the number {rng.randrange(1000)} at its end.\n\n{text}"
    else:
        asked = f"Write a story in which {rng.choice(WHO).lower()} is {rng.choice(WHERE)}, number {rng.randrange(1000)}."
    return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"


def requests(work: str, concurrent: int, seed: int) -> list[dict]:
    """Returns requests with different prompts for each seed, so that no round reuses the cached prompts of another round."""
    rng = random.Random(f"{work} {concurrent} {seed}")
    count = SINGLE_REQUESTS if concurrent == 1 else concurrent
    arrivals = [cases.after(index, OUTPUT_TOKENS) if concurrent == 1 else None for index in range(count)]
    made = [cases.request([], OUTPUT_TOKENS, arrival) for arrival in arrivals]
    return [request | {"prompt": prompt(work, rng)} for request in made]


def rounds_of(
    count: int, title: str, kinds: tuple[str, str], figure_of: Callable[[str, int], float]
) -> list[tuple[float, float]]:
    """Returns the figures of both kinds in each round, measured in an order that alternates."""
    measured = []
    for seed in range(count):
        figures = {}
        for kind in kinds if seed % 2 else kinds[::-1]:
            figures[kind] = figure_of(kind, seed)
            note = f"  {title} round {seed + 1}  {kind:8} {figures[kind]:8.1f} tok/s"
            print(note, file=sys.stderr, flush=True)
        measured.append((figures[kinds[0]], figures[kinds[1]]))
    return measured


def print_ratios(columns: tuple[str, str, str], titles: dict, measured: dict, wanted_of: Callable[..., float]) -> bool:
    """Prints a table of the medians, and returns whether all ratios meet their targets."""
    print(f"| {' | '.join(columns)} | ratio | target |\n|---|---|---|---|---|")
    all_good = True
    for key, figures in measured.items():
        ours, theirs = (statistics.median(column) for column in zip(*figures, strict=True))
        ratio = statistics.median(ours / theirs for ours, theirs in figures)
        wanted = wanted_of(key)
        all_good &= ratio >= wanted
        mark = "✓" if ratio >= wanted else "✗"
        print(f"| {titles[key]} | {ours:.0f} tok/s | {theirs:.0f} tok/s | **{ratio:.2f}** | ≥ {wanted} {mark} |")
    return all_good


def main() -> None:
    args = arguments()
    setup = bench_http.setup_of(args)
    measured = {}
    with engines.scratch() as directory, Server(args.server, setup, pathlib.Path(directory)) as server:
        for more in ({}, GUESSED):
            throughput(server.port, requests("edit", 8, 99), more)
        for work in args.work:
            for case in args.cases:

                def figure_of(kind: str, seed: int) -> float:
                    # A different salt for each run prevents hits in the prefix cache.
                    more = {"cache_salt": f"{work} {case} {seed} {kind}"} | (GUESSED if kind == "guessed" else {})
                    return throughput(server.port, requests(work, CONCURRENT[case], seed), more)

                measured[work, case] = rounds_of(args.rounds, f"{work} {case:4}", ("guessed", "plain"), figure_of)
    kept = {" ".join(key): figures for key, figures in measured.items()}
    (engines.WORK / "bench-lookup.json").write_text(json.dumps(kept, indent=1))
    print(f"{engines.versions()}\n{engines.machine()}\n")
    all_good = print_ratios(("work", "guessed", "plain"), TITLES, measured, lambda key: WANTED.get(key, WANTED_FREE))
    if args.strict and not all_good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
