#!/usr/bin/env python3
"""`make bench-engine`: compares the engine with openvino_genai in alternating runs (medians of the rounds).

Both engines run without HTTP and with the same precisions, number of threads and cache size. They receive the same
prompts in the same arrival pattern. With `ir`, both engines run the same IR. With `gguf`, our engine runs the GGUF
file, and openvino_genai runs the IR to which it converts this file (with rounded zero points). `gguf-int8` differs from
`gguf` only in the precision of our engine's activations. The floor is the throughput of the compiled model alone,
executed on the batches of the same case without sampling or sending tokens.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import re
import statistics
import sys

import engines
import plot
from cases import CASES, DELAYS, Case, Delay, measure, medians, scenario

# The combinations of model file and settings with which our engine is measured, and their titles. The last combination
# has a setting that is not the server's default.
TITLES = {
    "ir": "Both on the same IR",
    "gguf": "ovfleet on the GGUF file, openvino_genai on the IR to which it converts the file",
    "gguf-int8": "The same comparison with `--activation-precision int8`, which is not the default",
}
# Short titles of the same combinations, for the picture.
SHORT_TITLES = {"ir": "same IR", "gguf": "GGUF file, default", "gguf-int8": "GGUF file, --activation-precision int8"}
# The target ratio with `--activation-precision int8` in the cases with a fixed number of concurrent requests.
INT8_WANTED = 1.8
DOCUMENT = engines.ROOT / "docs" / "performance" / "results.md"
# The directory that contains the raw results for the tables in the document, and the pictures of these results.
RECORDS = engines.ROOT / "docs" / "benchmarks"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--engine", help="the engine-bench binary")
    parser.add_argument("--model", type=pathlib.Path, default=engines.SAMPLE, help="a GGUF file")
    parser.add_argument("--forms", nargs="+", choices=list(TITLES), default=["ir", "gguf"])
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=49_152, help="the exclusive upper bound of the token IDs in prompts")
    parser.add_argument(
        "--inference-precision",
        default=engines.served_precision(),
        help="default: the choice of the plugin, which is bf16 on processors that support it",
    )
    parser.add_argument("--kv-cache-precision", default="u8")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--max-chunk-tokens", type=int, help="only for our engine; default: that of the engine")
    parser.add_argument("--no-floor", action="store_true")
    parser.add_argument("--section", default="bench-engine", help="the section of the document that --update replaces")
    parser.add_argument("--update", action="store_true", help=f"write the tables to {DOCUMENT.name}, and record the raw results")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 if a ratio misses its target")
    return parser.parse_args()


class Bench:
    """The two engines, their settings, and the settings that they reported."""

    def __init__(self, args: argparse.Namespace, directory: pathlib.Path):
        self.args, self.directory = args, directory
        self.engine = engines.find_engine(args.engine)
        self.ir = engines.peer_ir(args.model)
        self.base = engines.Setup(
            self.ir,
            inference_precision=args.inference_precision,
            kv_cache_precision=args.kv_cache_precision,
            max_num_batched_tokens=args.max_num_batched_tokens,
            prefix_caching=True,
        )
        self.configs: dict[str, dict] = {}

    def ours(self, form: str, work: dict, max_itl_ms: int | None = None) -> dict:
        """Runs our engine once."""
        model = self.ir if form == "ir" else self.args.model
        chunk = self.args.max_chunk_tokens
        precision = "int8" if form == "gguf-int8" else "auto"
        setup = self.base.with_model(
            model, max_chunk_tokens=chunk, max_itl_ms=max_itl_ms, activation_precision=precision
        )
        result = engines.run_engine(self.engine, setup, work, self.directory)
        if max_itl_ms is None:
            self.configs[f"ovfleet on {form}"] = result["config"]
        return result

    def peer(self, work: dict) -> dict:
        """Runs the peer once."""
        result = engines.run_peer(self.base, work, self.directory)
        self.configs["openvino_genai on ir"] = result["config"]
        return result

    def round(self, case: Case, seed: int) -> dict[str, dict]:
        """Runs one round of a case: the peer, and each form of our engine with its floor (if the case has one), in an
        order that rotates from round to round."""
        work = scenario(case, seed, self.args.vocabulary)
        runs = [("peer", lambda: measure(case, self.peer(work)))]
        for form in self.args.forms:
            runs.append((form, lambda form=form: measure(case, self.ours(form, work, case.max_itl_ms))))
            if case.concurrent and not self.args.no_floor:
                runs.append((f"floor {form}", lambda form=form: self.floor(form, work)))
        turn = seed % len(runs)
        measured = {}
        for name, run in runs[turn:] + runs[:turn]:
            measured[name] = run()
            note = f"  {case.name:7} round {seed + 1}  {name:11} {measured[name]['figure']:9.3f}"
            print(note, file=sys.stderr, flush=True)
        return measured

    def floor(self, form: str, work: dict) -> dict:
        """Runs the compiled model alone on the batches of the case."""
        result = self.ours(form, work | {"kind": "floor"})
        return {"figure": result["output_tokens"] / result["seconds"]}


def wanted_of(case: Case, form: str) -> float:
    """Returns the target ratio of a case."""
    if form == "gguf-int8" and case.concurrent:
        return INT8_WANTED
    return case.wanted


def row_of(case: Case, form: str, rounds: list[dict]) -> tuple[str, bool]:
    """Returns a row of a table, and whether the ratio meets the target."""
    ours, peer = (medians([each[name] for each in rounds]) for name in (form, "peer"))
    ratio = statistics.median(each[form]["figure"] / each["peer"]["figure"] for each in rounds)
    wanted = wanted_of(case, form)
    good = ratio <= wanted if case.is_gap else ratio >= wanted
    floor = f"floor {form}"
    share = "–"
    if floor in rounds[0]:
        bare = statistics.median(each[floor]["figure"] for each in rounds)
        share = f"{bare:.0f}: {ours['figure'] / bare:.2f}"
        if form == "ir":
            share += f" / {peer['figure'] / bare:.2f}"
    unit = (lambda value: f"{value * 1000:.0f} ms") if case.is_gap else (lambda value: f"{value:.0f} tok/s")
    cells = [
        case.title,
        unit(ours["figure"]),
        unit(peer["figure"]),
        f"**{ratio:.2f}**",
        f"{'≤' if case.is_gap else '≥'} {wanted:.2f} {'✓' if good else '✗'}",
        pair(ours, peer, "first_token_mean"),
        pair(ours, peer, "first_token_p99"),
        pair(ours, peer, "gap_p50"),
        pair(ours, peer, "gap_p99"),
        share,
    ]
    return "| " + " | ".join(cells) + " |", good


def pair(ours: dict, peer: dict, key: str) -> str:
    """Formats two delays in milliseconds."""
    return f"{ours[key] * 1000:.0f} / {peer[key] * 1000:.0f}"


HEAD = (
    "| case | ovfleet | openvino_genai | ratio | target | first token mean, ms | first token p99, ms "
    "| between tokens p50, ms | between tokens p99, ms | floor, tok/s: share |\n" + "|---" * 10 + "|"
)


def delay_row(delay: Delay, form: str, rounds: list[dict]) -> tuple[str, bool]:
    """Returns a line with the ratio of a secondary figure of a case, and whether the ratio meets the target."""
    ratio = statistics.median(each[form][delay.key] / each["peer"][delay.key] for each in rounds)
    good = ratio <= delay.wanted
    target = f"target: ≤ {delay.wanted:.2f} {'✓' if good else '✗'}"
    return f"- {delay.title}: **{ratio:.2f}** times that of openvino_genai ({target})", good


def tables(bench: Bench, measured: dict[str, list[dict]]) -> tuple[str, bool]:
    """Returns the text to print, and whether all ratios meet their targets."""
    args = bench.args
    lines = [f"{datetime.date.today()}; {engines.versions()}.", f"Machine: {engines.machine()}.", ""]
    lines += [f"{args.model.name}, medians of {args.rounds} rounds; settings as read back from the engines:"]
    lines += [f"- {name}: {json.dumps(config)}" for name, config in sorted(bench.configs.items())]
    all_good = True
    for form in args.forms:
        lines += ["", f"**{TITLES[form]}** (values separated by a slash: ovfleet / openvino_genai)", "", HEAD]
        for case in CASES:
            if case.name in measured:
                row, good = row_of(case, form, measured[case.name])
                lines.append(row)
                all_good &= good
        lines.append("")
        for delay in DELAYS:
            if delay.case in measured:
                line, good = delay_row(delay, form, measured[delay.case])
                lines.append(line)
                all_good &= good
    return "\n".join(lines), all_good


def update(section: str, text: str) -> None:
    """Replaces the section between the markers in the document."""
    begin, end = (f"<!-- {section}: {edge} -->" for edge in ("begin", "end"))
    document = DOCUMENT.read_text()
    before, rest = document.split(begin)
    _, after = rest.split(end)
    arguments = [part if "/" not in part else pathlib.Path(part).name for part in sys.argv[1:]]
    # The name of a section may end with a kind of machine, which is not part of the name of the `make` target.
    target = re.sub("-(amx|avx2|avx512|intel|zen4)$", "", section)
    command = f"`make {target}` (`" + " ".join([pathlib.Path(sys.argv[0]).name, *arguments]) + "`)"
    DOCUMENT.write_text(f"{before}{begin}\n{command}\n\n{text}\n{end}{after}")


def main() -> None:
    args = arguments()
    measured: dict[str, list[dict]] = {}
    with engines.scratch() as directory:
        bench = Bench(args, pathlib.Path(directory))
        for seed in range(args.rounds):
            for case in CASES:
                if case.name in args.cases:
                    measured.setdefault(case.name, []).append(bench.round(case, seed))
    record = {
        "date": str(datetime.date.today()),
        "versions": engines.versions(),
        "machine": engines.machine(),
        "model": args.model.name,
        "configs": bench.configs,
        "titles": {form: SHORT_TITLES[form] for form in args.forms},
        "cases": {case.name: case.title for case in CASES if case.name in measured and not case.is_gap},
        "measured": measured,
    }
    directory = RECORDS if args.update else engines.WORK
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{args.section}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    plot.write(path)
    text, good = tables(bench, measured)
    print(text)
    if args.update:
        update(args.section, text)
    if args.strict and not good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
