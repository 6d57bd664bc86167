#!/usr/bin/env python3
"""`make conformance`: checks that the server runs models correctly.

The parts are:

- `oracle-ir`: greedy tokens on the IR, compared with those of openvino_genai
- `oracle-gguf`: greedy tokens on the GGUF file, compared with the dequantized model
- `prefix`: greedy tokens with the prefix cache, compared with those without it
- `perplexity`: perplexity as served by default, and with every other precision of the KV cache
- `noise`: rounding errors of the served model, compared with those of bf16 inference
- `random`: logits of small files that cover all tested architectures and tensor types
- `sampling`: the effect of each sampling parameter, compared with that in openvino_genai
- `beams`: beam search, compared with that of openvino_genai
- `images`: vision-language models, compared with transformers; runs only if `--parts` names it

The program prints a line for each check, and exits with status 1 if a check fails. docs/reference/conformance.md
explains each check and its tolerance.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import beams
import oracle
import quality
import sampling
import served
import vision
from oracle import Check, engines

# A setting that reduces accuracy and is therefore not a default. The program reports the increase in perplexity.
LOSSY = {"kv_cache_precision": "u4"}
PARTS = ("oracle-ir", "oracle-gguf", "prefix", "perplexity", "noise", "random", "sampling", "beams")
# A part that runs only if `--parts` names it, because its Python environments take 11 GB.
NAMED_PARTS = ("images",)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", help="the engine-bench binary")
    parser.add_argument("--model", type=pathlib.Path, default=engines.SAMPLE, help="a GGUF file with a chat template")
    parser.add_argument("--server", type=pathlib.Path, default=served.SERVER)
    parser.add_argument("--parts", nargs="+", choices=PARTS + NAMED_PARTS, default=PARTS)
    parser.add_argument("--kv-cache-precision", default="u8", help="precision of the KV cache for the perplexity")
    parser.add_argument(
        "--inference-precision",
        default=None,
        help="inference precision for the perplexity. Default: bf16 if the processor supports it, else f32",
    )
    return parser.parse_args()


def run(args: argparse.Namespace, directory: pathlib.Path):
    """Runs the selected parts and yields their checks."""
    engine = engines.find_engine(args.engine)
    ir = engines.peer_ir(args.model)
    stop_tokens = oracle.stop_tokens(ir)
    exact = engines.Setup(
        args.model,
        inference_precision="f32",
        kv_cache_precision="f32",
        stop_tokens=stop_tokens,
        peer_properties=quality.PLUGIN_PROJECTIONS,
    )
    served = exact.with_model(
        args.model,
        inference_precision=args.inference_precision or engines.served_precision(),
        kv_cache_precision=args.kv_cache_precision,
        peer_properties=(),
    )
    if "oracle-ir" in args.parts:
        # Check the native kernels with an f32 cache, but the plugin's kernels with an 8-bit cache: the peer uses the
        # plugin's 8-bit format, which differs from the native one.
        plugins = (*quality.PLUGIN_PROJECTIONS, *quality.PLUGIN_CACHE)
        yield from oracle.on_ir(engine, exact.with_model(ir), directory)
        yield from oracle.on_ir(engine, exact.with_model(ir, kv_cache_precision="u8", properties=plugins), directory)
    if "prefix" in args.parts:
        for precision in ("u8", "f32"):
            yield oracle.prefix_cache(engine, exact.with_model(args.model, kv_cache_precision=precision), ir, directory)
    on_the_ir = exact.with_model(ir, kv_cache_precision="f32")
    if "sampling" in args.parts:
        with engines.scratch() as own:
            yield from sampling.checks(args.server, on_the_ir, args.model, pathlib.Path(own))
    if "beams" in args.parts:
        with engines.scratch() as own:
            yield from beams.checks(args.server, on_the_ir, args.model, pathlib.Path(own))
    if "noise" in args.parts:
        yield from quality.noises(engine, served, ir, directory)
        yield from quality.random_noises(engine, served, directory)
    if "oracle-gguf" in args.parts:
        yield from oracle.on_gguf(engine, exact, ir, directory)
    if "perplexity" in args.parts:
        others = sorted({"u8", "f16", "bf16", "f32"} - {served.kv_cache_precision})
        setups = [served, *(served.with_model(args.model, kv_cache_precision=one) for one in others)]
        yield from quality.perplexities(engine, setups, ir, directory)
        yield quality.cost(engine, served.with_model(args.model, **LOSSY), ir, directory)
        yield from quality.long_costs(engine, served, ir, directory)
    if "images" in args.parts:
        yield from vision.checks()
    if "random" in args.parts:
        yield from quality.random_files(engine, exact, directory)


def main() -> None:
    args = arguments()
    print(f"{engines.versions()}\n{engines.machine()}", flush=True)
    failed = passed = 0
    with engines.scratch() as directory:
        for check in run(args, pathlib.Path(directory)):
            print(f"{'ok  ' if check.good else 'FAIL'} {check.name}: {check.detail}", flush=True)
            passed, failed = passed + check.good, failed + (not check.good)
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
