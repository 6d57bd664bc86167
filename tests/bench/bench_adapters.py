#!/usr/bin/env python3
"""`make bench-adapters`: measures the cost of LoRA adapters, relative to the same work without adapters (medians of the rounds).

In the variants *not used*, the adapters are loaded, but no request uses an adapter. In the variants *used*, successive
requests use each adapter in turn, and then no adapter.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys

import adapter
import cases
import engines

CONCURRENT = ["c1", "c8", "c32"]


def arguments() -> argparse.Namespace:
    known = argparse.ArgumentParser(description=__doc__)
    known.add_argument("--engine", help="the engine-bench binary")
    known.add_argument("--cases", nargs="+", choices=CONCURRENT, default=CONCURRENT)
    known.add_argument("--rounds", type=int, default=3)
    known.add_argument("--rank", type=int, default=16)
    known.add_argument("--counts", nargs="+", type=int, default=[1, 4], help="number of loaded adapters")
    return known.parse_args()


def variants(counts: list[int]) -> dict[str, tuple[int, list[int]]]:
    """Returns, for each variant, the number of loaded adapters and the adapters that requests use in turn (0: none)."""
    found: dict[str, tuple[int, list[int]]] = {"none": (0, [])}
    for count in counts:
        found[f"{count}, not used"] = (count, [0])
        found[f"{count}, used"] = (count, [*range(1, count + 1), 0])
    return found


def main() -> None:
    args = arguments()
    engine = engines.find_engine(args.engine)
    wanted = variants(args.counts)
    figures: dict[tuple[str, str], list[float]] = {}
    chosen = [case for case in cases.CASES if case.name in args.cases]
    with engines.scratch() as scratch:
        directory = pathlib.Path(scratch)
        paths = [adapter.write(directory / f"lora-{seed}", args.rank, seed) for seed in range(max(args.counts))]
        for seed in range(args.rounds):
            order = list(wanted.items())
            for case in chosen:
                scenario = cases.scenario(case, seed, 49152)
                for name, (count, turns) in order[seed % len(order) :] + order[: seed % len(order)]:
                    setup = engines.Setup(engines.SAMPLE, adapters=tuple(paths[:count]), adapter_turns=tuple(turns))
                    result = cases.measure(case, engines.run_engine(engine, setup, scenario, directory))
                    figures.setdefault((case.name, name), []).append(result["tokens_per_second"])
                    note = f"  {case.name:4} round {seed + 1}  {name:12} {result['tokens_per_second']:8.1f} tok/s"
                    print(note, file=sys.stderr, flush=True)
    print(f"{engines.versions()}\n{engines.machine()}\nrank {args.rank}, all projections\n")
    print(f"| adapters | {' | '.join(case.title for case in chosen)} |\n|---|{'---|' * len(chosen)}")
    for name in wanted:
        columns = []
        for case in chosen:
            pairs = zip(figures[case.name, name], figures[case.name, "none"], strict=True)
            ratio = statistics.median(with_them / without for with_them, without in pairs)
            columns.append(f"{statistics.median(figures[case.name, name]):.0f} tok/s, **{ratio:.2f}**")
        print(f"| {name} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
