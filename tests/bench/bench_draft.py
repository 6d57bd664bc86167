#!/usr/bin/env python3
"""`make bench-draft`: measures the cost of a draft model, the acceptance rate at which the draft model breaks even, and
its effect on the throughput of a server.

First, one process (`draft-bench`) measures the times of the model's steps with and without draft tokens, and the times
of the draft model's steps. Each accepted token saves its sequence one step of the model; each draft token costs a step
of the draft model and makes the step of the model longer. The draft model breaks even at the acceptance rate at which
the saving equals the cost.

Then two servers, one of them with the draft model, generate text in turn. Without `--draft-model`, the draft model
consists of the first layers of the model. Its tokens are seldom accepted, so the result shows the cost of detecting the
low acceptance rate and disabling the draft model.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess

import bench_http
import bench_lookup
import engines
from bench_http import Server, throughput

COSTS = engines.ROOT / "target" / "release" / "examples" / "draft-bench"
LAYERS = 3
# The target ratio of tokens per second: rejected draft tokens may cost at most 5%.
WANTED = 0.95


def arguments() -> argparse.Namespace:
    names = list(bench_lookup.CONCURRENT)
    known = bench_http.parser(__doc__, names, names)
    known.add_argument("--draft-model", dest="draft", type=pathlib.Path, help="the draft model")
    known.add_argument("--costs", type=pathlib.Path, default=COSTS, help="the draft-bench binary")
    known.add_argument("--work", nargs="+", choices=["edit", "free"], default=["free"])
    return known.parse_args()


class Drafted(Server):
    """Starts a server with a draft model."""

    def __init__(self, *server, draft: pathlib.Path):
        super().__init__(*server)
        self.draft = draft

    def command(self) -> list[str]:
        return [*super().command(), f"--draft-model={self.draft}"]


def costs_of(args: argparse.Namespace, setup: engines.Setup, draft: pathlib.Path | None) -> list[dict]:
    """Returns the median times of the model's steps and of the draft model's steps, for each number of sequences."""
    command = [str(args.costs), f"--model={args.model}", f"--plugin-config=INFERENCE_NUM_THREADS={setup.threads}"]
    command += [f"--plugin-config=INFERENCE_PRECISION_HINT={args.inference_precision}"]
    command += [f"--plugin-config=KV_CACHE_PRECISION={args.kv_cache_precision}"]
    command += [f"--draft={draft}"] if draft else []
    ran = subprocess.run(command, capture_output=True, text=True, timeout=engines.RUN_SECONDS_MAX, check=False)
    if ran.returncode:
        raise engines.Failed(f"draft-bench failed: {ran.stderr[-2000:]}")
    return json.loads(ran.stdout)


def print_costs(title: str, measured: list[dict]) -> None:
    """Prints the times, and the acceptance rates at which 1, 2 and 4 draft tokens break even."""
    print(f"\n{title}\n\n| sequences | step | with 1, 2, 4 drafts each | run of the draft model | breaks even at |")
    print("|---|---|---|---|---|")
    for row in measured:
        plain, *guessed = row["step_seconds"]
        run = row["run_seconds"]
        even = [run / plain + (step / plain - 1) / count for step, count in zip(guessed, row["drafts"][1:], strict=True)]
        steps = ", ".join(f"{1000 * step:.1f}" for step in guessed)
        shown = ", ".join(f"{each:.2f}" if each < 1 else "never" for each in even)
        print(f"| {row['rows']} | {1000 * plain:.1f} ms | {steps} ms | {1000 * run:.1f} ms | {shown} |")


def served(args: argparse.Namespace, setup: engines.Setup, draft: pathlib.Path, directory: pathlib.Path) -> dict:
    """Returns the tokens per second of each round with and without the draft model, by work and case."""
    measured: dict = {}
    with (
        Drafted(args.server, setup, directory, draft=draft) as drafted,
        Server(args.server, setup, directory / "plain") as plain,
    ):
        ports = {"drafted": drafted.port, "plain": plain.port}
        for port in ports.values():
            throughput(port, bench_lookup.requests("edit", 8, 99), {})
        for work in args.work:
            for case in args.cases:

                def figure_of(kind: str, seed: int) -> float:
                    return throughput(ports[kind], bench_lookup.requests(work, bench_lookup.CONCURRENT[case], seed), {})

                kinds = ("drafted", "plain")
                measured[work, case] = bench_lookup.rounds_of(args.rounds, f"{work} {case:4}", kinds, figure_of)
    return measured


def main() -> None:
    args = arguments()
    setup = bench_http.setup_of(args)
    with engines.scratch() as scratch:
        directory = pathlib.Path(scratch)
        (directory / "plain").mkdir()
        draft = args.draft
        if draft is None:
            draft = directory / "first-layers.gguf"
            subprocess.run(
                [str(args.costs), f"--model={args.model}", f"--cut={draft}", f"--layers={LAYERS}"], check=True
            )
        print(f"{engines.versions()}\n{engines.machine()}")
        print_costs(f"The draft model, {draft.name}", costs_of(args, setup, draft))
        print_costs("The model as its own draft model", costs_of(args, setup, None))
        measured = served(args, setup, draft, directory)
    print()
    columns = ("work", "with the draft model", "without")
    all_good = bench_lookup.print_ratios(columns, bench_lookup.TITLES, measured, lambda _: WANTED)
    if args.strict and not all_good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
