#!/usr/bin/env python3
"""`make bench-engine-8b`: compares the memory use and the speed of the engine with those of openvino_genai, on models of
realistic size.

The models have random weights (make_model.py). Each round for a model measures the time to read the model's file, and
the speed and memory use of both engines. It also measures the time and memory that our engine needs to load the model
without a cache directory, with an empty cache directory, and from the cache. The memory bandwidth limits how fast
tokens are generated, so each round measures it as well. The table contains the medians of the rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import bench_engine
import engines
import numpy as np
from cases import after, measure, request, Case
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Type
from make_model import SHAPES, Shape, make, tensors

PROMPT_TOKENS, OUTPUT_TOKENS, SINGLE_REQUESTS, CONCURRENT = 64, 32, 2, 8
BANDWIDTH = engines.ENGINE.with_name("read-bandwidth")
# The number of bits per weight in the packed format of the native projections, including scales and zero points.
PACKED_BITS = {Type.Q4_0: 5, Type.Q4_K: 5, Type.Q6_K: 6.5625}
MIB, GB = 1 << 20, 1e9
OURS, PEER = "ovfleet", "openvino_genai"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", help="the engine-bench binary")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["1b", "8b", "30b-a3b"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--kv-cache-gib", type=int, default=1)
    parser.add_argument("--work", type=pathlib.Path, default=engines.WORK, help="the directory of the models")
    parser.add_argument("--update", action="store_true", help="write the tables to results.md, and record the raw results")
    return parser.parse_args()


@dataclasses.dataclass(frozen=True)
class Weights:
    """The number of bytes of weights that are read for one token, in the file's format and in the packed format."""

    in_file: float
    packed: float


def weights_per_token(shape: Shape) -> Weights:
    """Returns how many bytes of weights are read to generate one token. Of the experts, only those in use are read."""
    in_file = packed = 0.0
    for name, kind, dimensions in tensors(shape, shape.vocabulary or 49_152):
        # A token needs only one row of the embedding matrix, unless this matrix is also the output matrix.
        if len(dimensions) == 1 or (name == "token_embd" and shape.has_output):
            continue
        count = float(np.prod(dimensions))
        if len(dimensions) == 3:
            count *= shape.experts_used / shape.experts
        values, size = GGML_QUANT_SIZES[kind]
        in_file += count / values * size
        packed += count * PACKED_BITS.get(kind, 32) / 8
    return Weights(in_file, packed)


def read_seconds(path: pathlib.Path) -> float:
    """Returns the time to read a file from the disk."""
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = bytearray(8 * MIB)
        start = time.perf_counter()
        while file.readinto(buffer):
            pass
        return time.perf_counter() - start


def bandwidth() -> float:
    """Returns the bytes per second that all threads together read from memory."""
    done = subprocess.run([BANDWIDTH], capture_output=True, text=True, check=True)
    return float(done.stdout)


def scenario(concurrent: int, vocabulary: int) -> dict:
    """Returns a scenario with `SINGLE_REQUESTS` sequential requests if `concurrent` is 1, or else with `concurrent`
    requests."""
    rng = random.Random(concurrent)

    def prompt() -> list[int]:
        return [rng.randrange(300, vocabulary) for _ in range(PROMPT_TOKENS)]

    count = SINGLE_REQUESTS if concurrent == 1 else concurrent
    arrivals = [after(index, OUTPUT_TOKENS) if concurrent == 1 else None for index in range(count)]
    requests = [request(prompt(), OUTPUT_TOKENS, arrival) for arrival in arrivals]
    return {"kind": "generate", "warmup": [request(prompt(), 2)], "requests": requests}


class Bench:
    """One model, and the figures of its rounds."""

    def __init__(self, args: argparse.Namespace, shape: Shape, directory: pathlib.Path):
        self.args, self.shape, self.directory = args, shape, directory
        self.path = make(shape)
        self.bytes = self.path.stat().st_size
        self.vocabulary = 49_152
        self.engine = engines.find_engine(args.engine)
        self.setup = engines.Setup(
            self.path, inference_precision=engines.served_precision(), kv_cache_gib=args.kv_cache_gib
        )
        self.runs: dict[str, Callable[[dict], dict]] = {OURS: self.ours}
        if not args.no_peer:
            try:
                peer = self.setup.with_model(engines.peer_ir(self.path))
                self.runs[PEER] = lambda work: engines.run_peer(peer, work, self.directory)
            except engines.Failed as error:
                print(f"  {PEER} cannot load {self.path.name}: {error}", flush=True)
        self.rounds: list[dict] = []

    def ours(self, work: dict, **changes) -> dict:
        return engines.run_engine(self.engine, self.setup.with_model(self.path, **changes), work, self.directory)

    def round(self) -> dict:
        """Returns the figures of one round: seconds, bytes, tokens per second, bytes per second, and fractions of the
        bandwidth."""
        figures = {"read_seconds": read_seconds(self.path)}
        print(f"  {self.path.name}: reading the file took {figures['read_seconds']:.1f} s", flush=True)
        cache = self.directory / "cache"
        work = scenario(1, self.vocabulary)
        work["requests"] = work["requests"][:1]
        for name, cache_dir in (("no cache", None), ("new cache", cache), ("cache", cache)):
            result = self.ours(work, cache_dir=cache_dir)
            figures |= memory(f"{OURS} {name}", result)
        if not result["from_cache"]:
            raise SystemExit("the compiled model was not cached")
        shutil.rmtree(cache, ignore_errors=True)
        read = figures["bandwidth"] = bandwidth()
        weights = weights_per_token(self.shape)
        for concurrent in (1, CONCURRENT):
            for name, run in list(self.runs.items()):
                try:
                    result = run(scenario(concurrent, self.vocabulary))
                except engines.Failed as error:
                    if name == OURS:
                        raise
                    print(f"  {PEER} is skipped, because a run failed: {error}", flush=True)
                    del self.runs[PEER]
                    continue
                row = measure(Case(f"c{concurrent}", "", 0, concurrent=concurrent), result)
                decode = concurrent / row["gap_p50"]
                case = f"{name} c{concurrent}"
                figures |= memory(case, result)
                figures[f"{case} tokens_per_second"] = row["figure"]
                figures[f"{case} first_token_mean"] = row["first_token_mean"]
                figures[f"{case} decode_tokens_per_second"] = decode
                print(f"  {case}: {row['figure']:.2f} tok/s, between first and last token {decode:.2f} tok/s", flush=True)
                if concurrent == 1:
                    figures[f"{name} bandwidth_share"] = weights.in_file * decode / read
                    figures[f"{name} packed_bandwidth_share"] = weights.packed * decode / read
        return figures

    def median(self, key: str) -> float:
        return statistics.median(each[key] for each in self.rounds)

    def seconds(self, key: str) -> str:
        return f"{self.median(key):.1f} s"

    def size(self, case: str) -> str:
        """Returns the allocated memory after loading and at the peak, in GB and as multiples of the file size."""
        sizes = (self.median(f"{case} {key}") for key in ("allocated_loaded", "allocated_peak"))
        return "; ".join(f"{size / GB:.2f} GB ({size / self.bytes:.2f})" for size in sizes)

    def pair(self, key: str, digits: int) -> str:
        """Returns the median figures of both engines, and the median of their ratios."""
        ours = f"{self.median(f'{OURS} {key}'):.{digits}f}"
        if PEER not in self.runs:
            return f"{ours} / –"
        ratio = statistics.median(each[f"{OURS} {key}"] / each[f"{PEER} {key}"] for each in self.rounds)
        return f"{ours} / {self.median(f'{PEER} {key}'):.{digits}f}, **{ratio:.2f}**"

    def shares(self) -> str:
        shares = [f"{self.median(f'{name} bandwidth_share'):.0%}" for name in self.runs]
        return " / ".join(shares + ["–"] * (2 - len(shares)))

    def column(self) -> dict[str, str]:
        """Returns the model's column of the table, as a map from row titles to cells."""
        cells = {
            "file": f"{self.bytes / GB:.2f} GB",
            "reading the file from the disk": self.seconds("read_seconds"),
            "loaded without a cache": self.seconds(f"{OURS} no cache load_seconds"),
            "loaded on the first start with a cache": self.seconds(f"{OURS} new cache load_seconds"),
            "loaded from the cache": self.seconds(f"{OURS} cache load_seconds"),
            "allocated when loaded; at the peak": self.size(f"{OURS} no cache"),
            "the same, first start with a cache": self.size(f"{OURS} new cache"),
            f"the same, {PEER}": self.size(f"{PEER} c1") if PEER in self.runs else "–",
        }
        for concurrent, title in ((1, "one request"), (CONCURRENT, f"{CONCURRENT} concurrent")):
            cells[f"{title}: tok/s"] = self.pair(f"c{concurrent} tokens_per_second", 2)
            cells[f"{title}: first token, mean, s"] = self.pair(f"c{concurrent} first_token_mean", 2)
            cells[f"{title}: tok/s between first and last token"] = self.pair(f"c{concurrent} decode_tokens_per_second", 2)
        cells["memory bandwidth"] = f"{self.median('bandwidth') / GB:.1f} GB/s"
        cells["one request: share of the bandwidth, weights as in the file"] = self.shares()
        cells["the same, weights as packed in memory"] = f"{self.median(f'{OURS} packed_bandwidth_share'):.0%}"
        return cells


def memory(case: str, result: dict) -> dict[str, float]:
    """Returns the load time (seconds) and the memory (bytes) of a run.

    The KV cache is allocated when the model is loaded, but its memory pages become resident only when they are used.
    """
    loaded = result["memory_loaded"]
    return {
        f"{case} load_seconds": result["load_seconds"],
        f"{case} allocated_loaded": loaded["anon_bytes"],
        f"{case} mapped_loaded": loaded["file_bytes"],
        f"{case} allocated_peak": result["anon_peak_bytes"],
        f"{case} resident_peak": result["memory_peak_bytes"],
    }


def table(args: argparse.Namespace, benches: list[Bench]) -> str:
    """Returns the text to print."""
    lines = [f"{datetime.date.today()}; {engines.versions()}.", f"Machine: {engines.machine()}.", ""]
    lines.append(
        f"Each request has {PROMPT_TOKENS} prompt tokens and {OUTPUT_TOKENS} output tokens, and the KV cache has a size of "
        f"{args.kv_cache_gib} GiB. Numbers are medians of {args.rounds} rounds. Numbers in parentheses are multiples of the file's size. "
        f"Values separated by a slash are those of {OURS} and {PEER}; their ratio is in bold."
    )
    columns = [bench.column() for bench in benches]
    lines += ["", "| | " + " | ".join(bench.path.stem for bench in benches) + " |", "|---" * (len(benches) + 1) + "|"]
    lines += [f"| {title} | " + " | ".join(column[title] for column in columns) + " |" for title in columns[0]]
    return "\n".join(lines)


def main() -> None:
    args = arguments()
    engines.WORK = args.work
    engines.versions()
    with engines.scratch() as directory:
        benches = []
        for name in args.models:
            bench = Bench(args, SHAPES[name], pathlib.Path(directory))
            bench.rounds += [bench.round() for _ in range(args.rounds)]
            benches.append(bench)
    record = {
        "date": str(datetime.date.today()),
        "versions": engines.versions(),
        "machine": engines.machine(),
        "models": {bench.path.stem: {"file_bytes": bench.bytes, "rounds": bench.rounds} for bench in benches},
    }
    path = (bench_engine.RECORDS if args.update else engines.WORK) / "bench-engine-8b.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    text = table(args, benches)
    print(text)
    if args.update:
        bench_engine.update("bench-engine-8b", text)
    print(f"raw results: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
