#!/usr/bin/env python3
"""The peer: runs a scenario (see README.md) on openvino_genai, in process.

`generate` uses `openvino_genai.ContinuousBatchingPipeline`, the engine of OpenVINO Model Server. This program calls
`step()`, so the time of a token is the end of its step. `score` runs the same IR, with the paged attention of the
pipeline, directly in the OpenVINO runtime.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import resource
import time

import numpy as np
import openvino as ov

FORMAT = {
    "warmup": {"prompt", "max_tokens", "ignore_eos", "logprobs", "arrival"},
    "generate": {"kind", "warmup", "requests"},
    "score": {"kind", "sequences", "logits"},
}
# openvino_genai accepts the size of its cache only in whole GiB.
GIB = 1 << 30


def parser(doc: str) -> argparse.ArgumentParser:
    """Returns the command-line parser that this program shares with peer_images.py."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="IR directory")
    parser.add_argument("--scenario", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--inference-precision", default="f32", choices=["f32", "bf16", "f16"])
    parser.add_argument("--property", action="append", default=[], help="KEY=VALUE for the plugin; may be repeated")
    parser.add_argument("--kv-cache-precision", default="u8", choices=["u8", "bf16", "f16", "f32"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--kv-cache-gib", type=int, default=2)
    parser.add_argument("--stop-token", type=int, action="append", default=[], help="a token that ends a sequence; may be repeated")
    parser.add_argument("--prefix-caching", action="store_true")
    return parser


def read_scenario(path: str) -> dict:
    """Reads a scenario; an unknown key is an error."""
    scenario = json.loads(pathlib.Path(path).read_text())
    kind = scenario["kind"]
    if kind not in ("generate", "score"):
        raise SystemExit(f"the peer does not support scenarios of kind {kind}")
    unknown = scenario.keys() - FORMAT[kind]
    for request in scenario.get("warmup", []) + scenario.get("requests", []):
        unknown |= request.keys() - FORMAT["warmup"]
    if unknown:
        raise SystemExit(f"unknown keys in {path}: {sorted(unknown)}")
    return scenario


def properties(args: argparse.Namespace) -> dict:
    """Returns the properties for compiling the model."""
    return {
        "INFERENCE_PRECISION_HINT": args.inference_precision,
        "KV_CACHE_PRECISION": args.kv_cache_precision,
        "INFERENCE_NUM_THREADS": args.threads,
        **dict(one.split("=", 1) for one in args.property),
    }


def head(args: argparse.Namespace, kind: str) -> dict:
    """Returns the fields that the results of all kinds of scenarios contain."""
    return {
        "engine": "openvino_genai",
        "version": importlib.metadata.version("openvino-genai"),
        "model": args.model,
        "kind": kind,
        "config": {
            "inference_precision": args.inference_precision,
            "kv_cache_precision": args.kv_cache_precision,
            "threads": args.threads,
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "kv_cache_bytes": args.kv_cache_gib * GIB,
            "prefix_caching": args.prefix_caching,
        },
    }


def pipeline(args: argparse.Namespace):
    """Returns the pipeline of a model, configured by the arguments."""
    import openvino_genai

    config = openvino_genai.SchedulerConfig()
    config.max_num_batched_tokens = args.max_num_batched_tokens
    config.cache_size = args.kv_cache_gib
    config.dynamic_split_fuse = True
    config.max_num_seqs = 256
    config.enable_prefix_caching = args.prefix_caching
    return openvino_genai.ContinuousBatchingPipeline(args.model, config, "CPU", properties(args))


class Run:
    """A pipeline and its requests."""

    def __init__(self, args: argparse.Namespace):
        import openvino_genai

        self.genai = openvino_genai
        self.pipeline = pipeline(args)
        self.stop_tokens = set(args.stop_token)
        self.next_id = 0

    def submit(self, request: dict):
        """Submits one request to the pipeline."""
        config = self.genai.GenerationConfig()
        config.max_new_tokens = request["max_tokens"]
        config.ignore_eos = request.get("ignore_eos", False)
        config.stop_token_ids = set() if config.ignore_eos else self.stop_tokens
        config.do_sample = False
        config.apply_chat_template = False
        # For any count above 0, the pipeline reports only the log probability of the generated token.
        config.logprobs = 0 if request.get("logprobs") is None else 1
        prompt = ov.Tensor(np.asarray([request["prompt"]], dtype=np.int64))
        self.next_id += 1
        return self.pipeline.add_request(self.next_id, prompt, config)

    def generate(self, requests: list[dict]) -> dict:
        """Submits each request at its `arrival`, and runs all of them to the end."""
        state = [{"arrived": None, "tokens": [], "times": [], "done": False} for _ in requests]
        logprobs = [[] for _ in requests]
        handles: dict[int, object] = {}
        start = time.perf_counter()

        def due(request: dict) -> bool:
            arrival = request.get("arrival")
            other = arrival and state[arrival["after_request"]]
            return not arrival or other["done"] or len(other["tokens"]) >= arrival["tokens"]

        while not all(row["done"] for row in state):
            for index, request in enumerate(requests):
                if state[index]["arrived"] is None and due(request):
                    state[index]["arrived"] = time.perf_counter() - start
                    handles[index] = self.submit(request)
            self.pipeline.step()
            now = time.perf_counter() - start
            for index, handle in list(handles.items()):
                row = state[index]
                while handle.can_read():
                    for output in handle.read().values():
                        row["tokens"] += output.generated_ids
                        row["times"] += [now] * len(output.generated_ids)
                        logprobs[index] += output.generated_log_probs
                if handle.get_status() != self.genai.GenerationStatus.RUNNING:
                    row["done"] = True
                    del handles[index]
        return {"seconds": time.perf_counter() - start, "requests": finish(requests, state, logprobs)}


def memory_loaded() -> dict:
    """Returns the resident memory of this process: allocated memory, and memory mapped from files."""
    status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    keys = {"anon_bytes": "RssAnon", "file_bytes": "RssFile"}
    return {name: int(status[key].split()[0]) * 1024 for name, key in keys.items()}


def finish(requests: list[dict], state: list[dict], logprobs: list[list[float]]) -> list[dict]:
    """Returns the results of the requests in the format that README.md describes."""
    results = []
    for request, row, chosen in zip(requests, state, logprobs):
        wanted = request.get("logprobs") is not None
        results.append({
            "arrived": row["arrived"],
            "cached_tokens": None,
            "tokens": row["tokens"],
            "times": row["times"],
            "logprobs": [{"chosen": value, "top": []} for value in chosen] if wanted else None,
            "finish_reason": "length" if len(row["tokens"]) == request["max_tokens"] else "stop",
            "error": None if row["tokens"] else "the pipeline returned no token",
        })
    return results


class Scorer:
    """Runs the IR with paged attention but without the pipeline. Each inference computes all logits of one sequence."""

    def __init__(self, args: argparse.Namespace):
        from openvino._offline_transformations import paged_attention_transformation

        core = ov.Core()
        model = core.read_model(pathlib.Path(args.model) / "openvino_model.xml")
        paged_attention_transformation(model)
        self.compiled = core.compile_model(model, "CPU", properties(args))
        self.request = self.compiled.create_infer_request()
        self.caches = {
            port.any_name: port for port in self.compiled.inputs if "cache." in port.any_name
        }
        key = next(port for name, port in self.caches.items() if name.startswith("key_cache"))
        value = next(port for name, port in self.caches.items() if name.startswith("value_cache"))
        # The number of tokens in a block is the smaller of the two sizes, because the key cache has additional rows for
        # scales if keys are quantized by channel.
        self.block = int(min(key.partial_shape[2].get_length(), value.partial_shape[2].get_length()))
        self.blocks = 0

    def allocate(self, blocks: int) -> None:
        """Allocates caches with at least this number of blocks."""
        if blocks <= self.blocks:
            return
        self.blocks = blocks
        for name, port in self.caches.items():
            shape = [blocks] + [int(size.get_length()) for size in list(port.partial_shape)[1:]]
            self.request.set_tensor(name, ov.Tensor(port.element_type, ov.Shape(shape)))

    def logits(self, sequence: list[int]) -> np.ndarray:
        """Returns the logits `[tokens, vocabulary]` of a sequence."""
        blocks = -(-len(sequence) // self.block)
        self.allocate(blocks)
        integers = {
            "past_lens": [0],
            "subsequence_begins": [0, len(sequence)],
            "block_indices": list(range(blocks)),
            "block_indices_begins": [0, blocks],
        }
        for name, values in integers.items():
            self.request.set_tensor(name, ov.Tensor(np.asarray(values, dtype=np.int32)))
        self.request.set_tensor("max_context_len", ov.Tensor(np.asarray(len(sequence), dtype=np.int32)))
        self.request.set_tensor("input_ids", ov.Tensor(np.asarray(sequence, dtype=np.int64)))
        self.request.set_tensor("position_ids", ov.Tensor(np.arange(len(sequence), dtype=np.int64)))
        self.request.infer()
        out = self.request.get_tensor("logits").data
        return out.reshape(len(sequence), out.shape[-1]).astype(np.float32)

    def score(self, scenario: dict, directory: pathlib.Path) -> dict:
        """Scores all sequences, and writes the requested rows of logits."""
        wanted = scenario.get("logits")
        rows = {} if wanted is None else {tuple(row): None for row in wanted["rows"]}
        scores = []
        for index, sequence in enumerate(scenario["sequences"]):
            logits = self.logits(sequence)
            for at, position in rows:
                if at == index:
                    rows[at, position] = logits[position].copy()
            scores.append(chosen_logprobs(logits, sequence))
        if wanted is not None:
            np.stack([rows[tuple(row)] for row in wanted["rows"]]).astype("<f4").tofile(directory / wanted["file"])
        return {"vocabulary": int(logits.shape[-1]), "sequences": scores}


def chosen_logprobs(logits: np.ndarray, sequence: list[int]) -> list[float]:
    """Returns the log probability of each token of the sequence except the first."""
    logits = logits[:-1]
    top = logits.max(axis=-1)
    sums = np.exp(logits - top[:, None]).sum(axis=-1, dtype=np.float64)
    chosen = logits[np.arange(len(logits)), np.asarray(sequence[1:])]
    return (chosen.astype(np.float64) - top - np.log(sums)).tolist()


def main() -> None:
    args = parser(__doc__).parse_args()
    scenario = read_scenario(args.scenario)
    result = head(args, scenario["kind"])
    start = time.perf_counter()
    if scenario["kind"] == "generate":
        run = Run(args)
        result["load_seconds"] = time.perf_counter() - start
        result["memory_loaded"] = memory_loaded()
        if scenario.get("warmup"):
            run.generate(scenario["warmup"])
        result |= run.generate(scenario["requests"])
    else:
        scorer = Scorer(args)
        result["load_seconds"] = time.perf_counter() - start
        result["config"]["block_tokens"] = scorer.block
        result |= scorer.score(scenario, pathlib.Path(args.scenario).parent)
    result["memory_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pathlib.Path(args.out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
