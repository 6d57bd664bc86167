"""Compares greedy tokens with two oracles.

For an IR, the oracle is openvino_genai with the same inference and KV cache precision. For a GGUF file, the oracle is
the numpy reference, which scores our tokens: each of them must be the reference's most probable token at that position
or a near-tie with it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "bench"))

import engines
import reference

OUTPUT_TOKENS = 64
BATCH = 32
# The smallest tolerance for a GGUF file. The engine's weights differ slightly from the reference's, because the engine
# does not store them in f32. docs/reference/conformance.md reports the effect on random logits.
NEAR_TIE_GGUF = 0.03
IDENTICAL_MIN, PROMPTS = 49, 50
# The native kernels round activations to 15 bits. This changes log probabilities by several thousandths, so some
# near-ties are resolved differently than in f32.
IDENTICAL_MIN_NATIVE = 47
# With an 8-bit cache, the peer itself reproduces in batches only some of the outputs that it generates one at a time
# (42 of 50). The required number of our outputs in batches that equal the peer's is the number that the peer reproduces
# minus this, but at most IDENTICAL_MIN.
BATCH_SLACK = 3
# The minimum fraction of outputs that an 8-bit prefix cache leaves unchanged.
PREFIX_SHARE_MIN_U8 = 0.7
# Two tokens whose log probabilities differ by at most this are a near-tie. Which of them is chosen can depend on the
# order of additions (f32), or on the chunk boundaries, which determine which values are rounded to 8 bits (u8).
NEAR_TIE = {"f32": 0.01, "bf16": 0.1, "f16": 0.05, "u8": 0.1}


@dataclasses.dataclass
class Check:
    """A line of the report."""

    name: str
    good: bool
    detail: str


def near_tie(setup: engines.Setup) -> float:
    """Returns the tolerance of a setup, which depends on the coarser of its two precisions."""
    return max(NEAR_TIE[setup.inference_precision], NEAR_TIE[setup.kv_cache_precision])


def stop_tokens(ir: pathlib.Path) -> tuple[int, ...]:
    """Returns the model's end token."""
    import openvino_genai

    return (int(openvino_genai.Tokenizer(str(ir)).get_eos_token_id()),)


def prompts(ir: pathlib.Path) -> list[list[int]]:
    """Returns the chat prompts, tokenized with the tokenizer of the IR directory."""
    import openvino_genai

    tokenizer = openvino_genai.Tokenizer(str(ir))
    chats = json.loads((HERE / "prompts.json").read_text())
    assert len(chats) == PROMPTS
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    return [tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist() for text in texts]


def greedy(tokens: list[list[int]], concurrent: int, logprobs: int | None) -> dict:
    """Returns a scenario in which `concurrent` requests run at the same time."""
    requests = []
    for index, prompt in enumerate(tokens):
        arrival = None
        if index >= concurrent:
            arrival = {"after_request": index - concurrent, "tokens": OUTPUT_TOKENS}
        requests.append({"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "logprobs": logprobs, "arrival": arrival})
    return {"kind": "generate", "requests": requests}


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """Returns the first position at which two outputs differ. The end of the shorter output counts as a difference."""
    if ours == theirs:
        return None
    return next((at for at, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))


def identical_count(some: dict, others: dict) -> int:
    """Returns the number of requests that have the same tokens in both results."""
    pairs = zip(some["requests"], others["requests"], strict=True)
    return sum(one["tokens"] == other["tokens"] for one, other in pairs)


def compare(name: str, pair: tuple[dict, dict], tolerance: float, identical_min: int = IDENTICAL_MIN) -> Check:
    """Counts identical outputs. Every first difference must be a near-tie by our log probabilities."""
    ours, theirs = pair
    identical, notes, unjustified = 0, [], 0
    for index, (mine, other) in enumerate(zip(ours["requests"], theirs["requests"], strict=True)):
        at = first_difference(mine["tokens"], other["tokens"])
        if at is None:
            identical += 1
            continue
        gap = None
        if at < len(mine["tokens"]) and at < len(other["tokens"]):
            top = dict((token, logprob) for token, logprob in mine["logprobs"][at]["top"])
            rival = other["tokens"][at]
            gap = mine["logprobs"][at]["chosen"] - top[rival] if rival in top else None
        good = gap is not None and abs(gap) <= tolerance
        unjustified += not good
        told = "one output ended, or its token is not among our two most probable" if gap is None else f"gap {gap:.4f}"
        notes.append(f"prompt {index} at token {at}: {told}")
    good = identical >= identical_min and unjustified == 0
    detail = (
        f"{identical} of {len(ours['requests'])} identical (at least {identical_min}), "
        f"{unjustified} differences that are not near-ties (tolerance {tolerance})"
    )
    return Check(name, good, "; ".join([detail, *notes]))


def on_ir(engine: pathlib.Path, setup: engines.Setup, directory: pathlib.Path) -> list[Check]:
    """Compares the outputs that our engine generates one at a time and in batches with those that the peer generates
    one at a time."""
    tokens = prompts(setup.model)
    oracle = engines.run_peer(setup, greedy(tokens, 1, None), directory)
    label = f"IR, {setup.inference_precision} with {setup.kv_cache_precision} KV"
    checks = []
    for name, concurrent in (("one at a time", 1), (f"in batches of {BATCH}", BATCH)):
        ours = engines.run_engine(engine, setup, greedy(tokens, concurrent, 2), directory)
        identical_min = IDENTICAL_MIN if setup.properties else IDENTICAL_MIN_NATIVE
        if concurrent > 1 and setup.kv_cache_precision == "u8":
            peer = engines.run_peer(setup, greedy(tokens, concurrent, None), directory)
            identical_min = min(IDENTICAL_MIN, identical_count(peer, oracle) - BATCH_SLACK)
        name = f"{label}: {name} against openvino_genai one at a time"
        checks.append(compare(name, (ours, oracle), near_tie(setup), identical_min))
    return checks


def prefix_cache(engine: pathlib.Path, setup: engines.Setup, ir: pathlib.Path, directory: pathlib.Path) -> Check:
    """Sends each selected prompt twice, so that the second request uses the prefix cache, and compares the tokens with
    those that are generated without the cache."""
    # Select all long prompts and about a third of the others. Prepend the longest prompt to each of them, so that the
    # cache contains several blocks of every request.
    tokens = [prompt for prompt in prompts(ir) if len(prompt) > 64 or len(prompt) % 3 == 0]
    shared = max(tokens, key=len)
    work = greedy([shared + prompt for prompt in tokens for _ in range(2)], 1, 2)
    results = []
    for caching in (False, True):
        results.append(engines.run_engine(engine, dataclasses.replace(setup, prefix_caching=caching), work, directory))
    off, on = results
    cached = sum(row["cached_tokens"] or 0 for row in on["requests"])
    name = f"prefix cache on and off, {setup.kv_cache_precision} KV"
    total = len(work["requests"])
    # With an 8-bit cache, the plugin's attention uses rounded keys and values of earlier chunks, but unrounded ones of
    # the current chunk, so the prefix cache changes more outputs. The native attention rounds all keys and values.
    share_min = 1 - 1 / PROMPTS if setup.kv_cache_precision == "f32" else PREFIX_SHARE_MIN_U8
    check = compare(name, (on, off), near_tie(setup), math.ceil(share_min * total))
    return Check(name, cached > 0 and check.good, f"{cached} prompt tokens from the cache; {check.detail}")


def on_gguf(engine: pathlib.Path, setup: engines.Setup, ir: pathlib.Path, directory: pathlib.Path) -> list[Check]:
    """Checks that each of our tokens is the most probable token of the reference or a near-tie."""
    tokens = prompts(ir)
    ours = engines.run_engine(engine, setup, greedy(tokens, BATCH, 2), directory)
    model = reference.Reference(str(setup.model))
    worst, other, total = 0.0, 0, 0
    for prompt, row in zip(tokens, ours["requests"], strict=True):
        logits = model.logits([prompt + row["tokens"]])[0][len(prompt) - 1 : -1]
        rows = reference.log_softmax(logits)
        gaps = rows.max(axis=-1) - rows[np.arange(len(rows)), row["tokens"]]
        worst, other, total = max(worst, float(gaps.max())), other + int((gaps > 0).sum()), total + len(gaps)
    tolerance = max(near_tie(setup), NEAR_TIE_GGUF)
    detail = (
        f"{total - other} of {total} tokens are the reference's first choice, "
        f"the log probability of the others is lower by at most {worst:.4f} (tolerance {tolerance})"
    )
    name = f"GGUF, {setup.inference_precision} with {setup.kv_cache_precision} KV"
    return [Check(f"{name}: against the dequantized model", worst <= tolerance, detail)]
