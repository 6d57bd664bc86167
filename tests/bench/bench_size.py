#!/usr/bin/env python3
"""`make bench-engine-8b`: loads models of real size, and compares their memory and speed with openvino_genai.

The models have random weights (make_model.py). For each of them, the program prints the time to read its file, the time and
the memory to load it (without a cache directory, with one, and from the cache), and the speed of both engines in the same
run. The bandwidth of the memory limits how fast tokens are generated, so it is measured as well.
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
import subprocess
import sys
import time

import engines
import numpy as np
from cases import after, measure, request, Case
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Type
from make_model import SHAPES, Shape, make, tensors

PROMPT_TOKENS, OUTPUT_TOKENS, SINGLE_REQUESTS, CONCURRENT = 64, 32, 2, 8
BANDWIDTH = engines.ENGINE.with_name("read-bandwidth")
# The bits of a weight in the packed format of the native projections, with its part of the scale and the zero point.
PACKED_BITS = {Type.Q4_0: 5, Type.Q4_K: 5, Type.Q6_K: 6.5625}
MIB, GB = 1 << 20, 1e9


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", help="the engine-bench binary")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["8b", "30b-a3b"])
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--kv-cache-gib", type=int, default=1)
    parser.add_argument("--work", type=pathlib.Path, default=engines.WORK, help="the folder of the models")
    return parser.parse_args()


@dataclasses.dataclass(frozen=True)
class Weights:
    """The bytes of the weights that a token reads: of the file, and of the packed matrices in memory."""

    in_file: float
    packed: float


def weights_per_token(shape: Shape) -> Weights:
    """Returns the bytes that generating one token reads. It reads only the experts that are used."""
    in_file = packed = 0.0
    for name, kind, dimensions in tensors(shape, shape.vocabulary or 49_152):
        # The embedding of a token is one row, unless the same weights are the output.
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
    """Returns the time of reading a file from the disk."""
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
    """Returns the scenario of some requests, one after the other or all at the same time."""
    rng = random.Random(concurrent)

    def prompt() -> list[int]:
        return [rng.randrange(300, vocabulary) for _ in range(PROMPT_TOKENS)]

    count = SINGLE_REQUESTS if concurrent == 1 else concurrent
    arrivals = [after(index, OUTPUT_TOKENS) if concurrent == 1 else None for index in range(count)]
    requests = [request(prompt(), OUTPUT_TOKENS, arrival) for arrival in arrivals]
    return {"kind": "generate", "warmup": [request(prompt(), 2)], "requests": requests}


class Bench:
    """One model, with the results so far."""

    def __init__(self, args: argparse.Namespace, shape: Shape, folder: pathlib.Path):
        self.args, self.shape, self.folder = args, shape, folder
        self.path = make(shape)
        self.bytes = self.path.stat().st_size
        self.vocabulary = 49_152
        self.engine = engines.find_engine(args.engine)
        self.setup = engines.Setup(
            self.path, inference_precision=engines.served_precision(), kv_cache_gib=args.kv_cache_gib
        )
        self.record: dict = {"file_bytes": self.bytes}

    def note(self, text: str) -> None:
        print(f"  {text}", flush=True)

    def ours(self, work: dict, **changes) -> dict:
        return engines.run_engine(self.engine, self.setup.with_model(self.path, **changes), work, self.folder)

    def show_memory(self, name: str, result: dict) -> None:
        """Prints the load time and the memory of a run, also as multiples of the size of the file."""
        loaded = result["memory_loaded"]
        # The cache is allocated when the model is loaded, but its pages are only touched when they are used.
        figures = {
            "allocated when loaded": loaded["anon_bytes"],
            "mapped files when loaded": loaded["file_bytes"],
            "allocated, peak": result["anon_peak_bytes"],
            "resident, peak": result["memory_peak_bytes"],
        }
        text = ", ".join(f"{key} {value / GB:.2f} GB ({value / self.bytes:.2f})" for key, value in figures.items())
        self.note(f"{name}: loaded in {result['load_seconds']:.1f} s; {text}")
        self.record[name] = {"load_seconds": result["load_seconds"], **figures}

    def load(self) -> None:
        """Measures the time and the memory of loading."""
        cache = self.folder / "cache"
        seconds = self.record["read_seconds"] = read_seconds(self.path)
        self.note(f"reading the file from the disk: {seconds:.1f} s ({self.bytes / seconds / MIB:.0f} MiB/s)")
        work = scenario(1, self.vocabulary)
        work["requests"] = work["requests"][:1]
        for name, cache_dir in (("without a cache", None), ("first start with a cache", cache), ("from the cache", cache)):
            result = self.ours(work, cache_dir=cache_dir)
            self.show_memory(name, result)
        if not result["from_cache"]:
            self.note("the compiled model was not cached")
        shutil.rmtree(cache, ignore_errors=True)

    def speed(self) -> None:
        """Measures the speed of both engines."""
        runs = {"ovfleet": self.ours}
        peer = None
        if not self.args.no_peer:
            try:
                peer = self.setup.with_model(engines.peer_ir(self.path))
                runs["openvino_genai"] = lambda work: engines.run_peer(peer, work, self.folder)
            except engines.Failed as error:
                self.note(f"openvino_genai: {error}")
        read = bandwidth()
        self.record["bandwidth"] = read
        self.note(f"reading memory: {read / GB:.1f} GB/s")
        for concurrent in (1, CONCURRENT):
            for name, run in runs.items():
                try:
                    result = run(scenario(concurrent, self.vocabulary))
                except engines.Failed as error:
                    self.note(f"{name}, {concurrent} concurrent: {error}")
                    continue
                if name != "ovfleet" and concurrent == 1:
                    self.show_memory(name, result)
                self.show_speed(name, concurrent, result, read)

    def show_speed(self, name: str, concurrent: int, result: dict, read: float) -> None:
        row = measure(Case(f"c{concurrent}", "", 0, concurrent=concurrent), result)
        decode = concurrent / row["gap_p50"]
        text = (
            f"{name}, {concurrent} concurrent: first token {row['first_token_mean'] * 1000:.0f} ms, "
            f"{row['figure']:.2f} tok/s, between first and last token {decode:.2f} tok/s"
        )
        if concurrent == 1:
            weights = weights_per_token(self.shape)
            text += f"; weights of the file {weights.in_file * decode / read:.0%} of the bandwidth"
            if name == "ovfleet":
                text += f", packed weights {weights.packed * decode / read:.0%}"
        self.note(text)
        self.record[f"{name} c{concurrent}"] = row | {"decode_tokens_per_second": decode}


def main() -> None:
    args = arguments()
    engines.WORK = args.work
    print(f"{datetime.date.today()}; {engines.versions()}.\nMachine: {engines.machine()}.")
    print(f"{PROMPT_TOKENS} prompt tokens, {OUTPUT_TOKENS} output tokens, {args.kv_cache_gib} GiB of KV cache.")
    records = {}
    with engines.scratch() as folder:
        for name in args.models:
            shape = SHAPES[name]
            bench = Bench(args, shape, pathlib.Path(folder))
            print(f"{bench.path.name}, {bench.bytes / GB:.2f} GB (in brackets: multiples of it)")
            bench.load()
            bench.speed()
            records[name] = bench.record
    path = engines.WORK / "bench-engine-8b.json"
    path.write_text(json.dumps({"date": str(datetime.date.today()), "machine": engines.machine(), "models": records}, indent=1) + "\n")
    print(f"raw results: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
