#!/usr/bin/env python3
"""Compares the beam search of the server, and that of a straightforward reference implementation, with that of the
peer, openvino_genai.

`beams.py peer --out FILE` writes the results of the peer. `beams.py plain` compares the results of the reference
implementation with those of the peer. `beams.py compare` runs the server on the same IR and compares its responses from
`/v1/completions` with the results of the peer. `make conformance ARGS="--parts beams"` makes both comparisons.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib

import numpy as np

import genai
import oracle
import reference
import served
from oracle import Check, engines

# These prompts have short answers, so beams end at different lengths.
PROMPTS = (0, 3, 6, 13, 22, 45)
OUTPUT_TOKENS = 20
# If the scores of two sequences differ by at most this, the peer may rank them in the other order, which can change all
# later tokens.
NEAR_TIE = 0.005
# The minimum fraction of identical sequences in a case. Two near-ties are always allowed.
IDENTICAL_SHARE_MIN = 0.97


@dataclasses.dataclass(frozen=True)
class Case:
    """The parameters of a beam search."""

    width: int
    returned: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    groups: int = 1
    diversity_penalty: float = 0.0
    # Whether sequences end not only at the end token, but also at periods and commas.
    stop_at_sentences: bool = True
    max_tokens: int = OUTPUT_TOKENS

    def name(self) -> str:
        """Returns the description of the case in the report."""
        changed = [
            f"{field.name} {getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return ", ".join(changed)


CASES = (
    Case(2),
    Case(4),
    Case(4, returned=4),
    Case(4, returned=4, stop_at_sentences=False),
    Case(4, returned=4, length_penalty=0.5),
    Case(4, returned=4, length_penalty=2.0),
    Case(4, returned=4, length_penalty=0.0),
    Case(4, returned=4, length_penalty=-1.0),
    Case(4, returned=4, early_stopping=True),
    Case(4, returned=4, early_stopping="never"),
    Case(4, returned=4, length_penalty=2.0, early_stopping="never"),
    Case(2, returned=2, length_penalty=0.5, early_stopping=True),
    Case(4, returned=4, groups=2, diversity_penalty=1.0),
    Case(4, returned=2, groups=2, diversity_penalty=0.3, early_stopping=True),
    Case(4, returned=4, groups=4, diversity_penalty=0.5),
    Case(4, returned=4, max_tokens=3),
    Case(4, returned=4, max_tokens=1),
)


def stop_tokens(model: genai.Genai, setup: engines.Setup, case: Case) -> list[int]:
    """Returns the tokens that end a sequence."""
    sentences = [int(model.tokenizer.encode(text).input_ids.data[0][0]) for text in (".", ",")]
    return sorted({*setup.stop_tokens, *(sentences if case.stop_at_sentences else [])})


def peer_parameters(case: Case, stops: list[int]) -> dict:
    """Returns the parameters of a case for openvino_genai."""
    return {
        "num_beams": case.width,
        "num_return_sequences": case.returned,
        "length_penalty": case.length_penalty,
        "early_stopping": case.early_stopping,
        "num_beam_groups": case.groups,
        "diversity_penalty": case.diversity_penalty,
        "max_new_tokens": case.max_tokens,
        "stop_token_ids": stops,
    }


def our_parameters(case: Case, stops: list[int]) -> dict:
    """Returns the parameters of a case for our API."""
    return {
        "use_beam_search": True,
        "best_of": case.width,
        "n": case.returned,
        "length_penalty": case.length_penalty,
        "early_stopping": case.early_stopping,
        "num_beam_groups": case.groups,
        "diversity_penalty": case.diversity_penalty,
        "max_tokens": case.max_tokens,
        "stop_token_ids": stops,
    }


@dataclasses.dataclass
class Beam:
    """A sequence and the sum of its log probabilities, including diversity penalties."""

    tokens: tuple[int, ...]
    sum: float


class Group:
    """One group of a beam search, with the semantics of openvino_genai."""

    def __init__(self, size: int):
        self.ongoing = [Beam((), 0.0)] + [Beam((), -math.inf)] * (size - 1)
        self.ended: list[tuple[float, Beam]] = []
        self.done = False

    def end(self, beam: Beam, case: Case) -> None:
        """Stores a beam that has ended, if it is among the best of its group."""
        self.ended.append((beam.sum / len(beam.tokens) ** case.length_penalty, beam))
        self.ended.sort(key=lambda one: -one[0])
        del self.ended[len(self.ongoing) :]

    def is_done(self, case: Case) -> bool:
        """Whether the group is complete: enough beams have ended, and the beam that was the best running one *before*
        this step cannot beat the worst ended one. If `early_stopping` is true, the first condition suffices."""
        if len(self.ended) < len(self.ongoing):
            return False
        if case.early_stopping is True:
            return True
        best = self.ongoing[0]
        length = len(best.tokens)
        if case.early_stopping == "never" and case.length_penalty > 0:
            length = case.max_tokens
        if length == 0 and case.length_penalty != 0:
            return False
        return self.ended[-1][0] >= best.sum / length**case.length_penalty


class Plain:
    """A straightforward implementation of openvino_genai's beam search on the runtime's logits."""

    def __init__(self, logits: genai.Logits):
        self.logits = logits
        self.known: dict[tuple[int, ...], np.ndarray] = {}

    def logprobs(self, tokens: tuple[int, ...]) -> np.ndarray:
        """Returns the log probabilities of the next token; each sequence is computed once."""
        if tokens not in self.known:
            self.known[tokens] = reference.log_softmax(self.logits.after(list(tokens))[None])[0]
        return self.known[tokens]

    def search(self, prompt: list[int], case: Case, stops: list[int]) -> list[tuple[float, list[int]]]:
        """Returns the best `case.returned` sequences of all groups, with their scores."""
        size = case.width // case.groups
        groups = [Group(size) for _ in range(case.groups)]
        for step in range(case.max_tokens):
            chosen: list[int] = []
            for group in groups:
                if not group.done:
                    chosen += self.step(group, prompt, case, (stops, list(chosen)))
            if step + 1 == case.max_tokens:
                for group in (group for group in groups if not group.done):
                    for beam in group.ongoing:
                        group.end(beam, case)
            elif all(group.done for group in groups):
                break
        ended = sorted((one for group in groups for one in group.ended), key=lambda one: -one[0])
        return [(score, list(beam.tokens)) for score, beam in ended[: case.returned]]

    def step(self, group: Group, prompt: list[int], case: Case, about: tuple[list[int], list[int]]) -> list[int]:
        """Extends the beams of a group by one token, and returns these tokens, or none if the group is now complete."""
        stops, penalized = about
        size = len(group.ongoing)
        candidates = []
        for beam in group.ongoing:
            if beam.sum == -math.inf:
                continue
            logprobs = self.logprobs((*prompt, *beam.tokens)).copy()
            for token in penalized:
                logprobs[token] -= case.diversity_penalty
            for token in np.argsort(-logprobs, kind="stable")[: 2 * size]:
                candidates.append(Beam((*beam.tokens, int(token)), beam.sum + float(logprobs[token])))
        candidates.sort(key=lambda beam: -beam.sum)
        children = []
        for rank, beam in enumerate(candidates):
            if beam.tokens[-1] in stops:
                if rank < size:
                    group.end(beam, case)
                continue
            children.append(beam)
            if len(children) == size:
                break
        group.done = group.is_done(case) or not children
        if group.done:
            return []
        group.ongoing = children
        return [beam.tokens[-1] for beam in children]


def same(ours: list[int], theirs: list[int], stops: list[int]) -> bool:
    """Whether two outputs have the same tokens, except for a final stop token, which only one of them may include."""
    cut = [one[:-1] if one and one[-1] in stops else one for one in (ours, theirs)]
    return cut[0] == cut[1]


def compare(name: str, pairs: list[tuple[list, list, list[int]]]) -> Check:
    """Compares our outputs with those of the peer. Each element of `pairs` contains our outputs for a prompt, those of
    the peer for the same prompt, and the stop tokens. Each output is (score or None, tokens)."""
    total = identical = faults = 0
    notes = []
    for index, (ours, theirs, stops) in enumerate(pairs):
        if len(ours) != len(theirs):
            faults += 1
            notes.append(f"prompt {index}: {len(ours)} sequences, not {len(theirs)}")
        for rank, (mine, other) in enumerate(zip(ours, theirs)):
            total += 1
            if same(mine[1], other[1], stops):
                identical += 1
                continue
            # If two sequences have nearly equal scores, the peer may rank them in the other order.
            gap = math.inf if mine[0] is None else abs(mine[0] - other[0])
            faults += gap > NEAR_TIE
            notes.append(f"prompt {index}, sequence {rank}: {mine[1]}, not {other[1]}; scores {gap:.5f} apart")
    detail = f"{identical} of {total} sequences identical, {faults} differences are not near-ties (tolerance {NEAR_TIE})"
    # Two differences are always allowed, because a single near-tie can change the ranks of two sequences.
    good = faults == 0 and total - identical <= max(2, (1 - IDENTICAL_SHARE_MIN) * total)
    return Check(name, good, "; ".join([detail, *notes]))


def peer_results(model: genai.Genai, setup: engines.Setup) -> list[dict]:
    """Returns the results of the peer for each case and prompt."""
    prompts = oracle.prompts(setup.model)
    results = []
    for case in CASES:
        stops = stop_tokens(model, setup, case)
        outputs = []
        for index in PROMPTS:
            found = model.generate(prompts[index], peer_parameters(case, stops))
            outputs.append([(one.score, one.tokens) for one in found])
        results.append({"case": dataclasses.asdict(case), "stops": stops, "outputs": outputs})
    return results


def plain_against_peer(plain: Plain, setup: engines.Setup, results: list[dict]):
    """Checks for each case that the reference implementation and the peer agree."""
    prompts = oracle.prompts(setup.model)
    for result in results:
        case, stops = Case(**result["case"]), result["stops"]
        found = [plain.search(prompts[index], case, stops) for index in PROMPTS]
        pairs = [(mine, other, stops) for mine, other in zip(found, result["outputs"], strict=True)]
        yield compare(f"beams of the reference implementation against openvino_genai: {case.name()}", pairs)


def ours_against_peer(api: served.Api, plain: Plain, setup: engines.Setup, results: list[dict]):
    """Yields a check for each case."""
    prompts = oracle.prompts(setup.model)
    for result in results:
        case, stops = Case(**result["case"]), result["stops"]
        pairs = []
        for index, other in zip(PROMPTS, result["outputs"], strict=True):
            answer = api.completion(prompts[index], our_parameters(case, stops))
            mine = [(None, choice["token_ids"]) for choice in answer["choices"]]
            if case.diversity_penalty == 0:
                mine = [(score(plain, prompts[index], tokens, case), tokens) for _, tokens in mine]
            pairs.append((mine, other, stops))
        yield compare(f"beams against openvino_genai: {case.name()}", pairs)


def score(plain: Plain, prompt: list[int], tokens: list[int], case: Case) -> float:
    """Returns the score of a sequence that was generated without a diversity penalty."""
    total = sum(float(plain.logprobs((*prompt, *tokens[:at]))[token]) for at, token in enumerate(tokens))
    return total / max(len(tokens), 1) ** case.length_penalty


def checks(server: pathlib.Path, setup: engines.Setup, model: pathlib.Path, directory: pathlib.Path):
    """Compares the reference implementation and our server with the peer."""
    results = peer_results(genai.Genai(setup), setup)
    plain = Plain(genai.Logits(setup))
    yield from plain_against_peer(plain, setup, results)
    with served.Api.start(server, setup, model, directory) as api:
        yield from ours_against_peer(api, plain, setup, results)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["peer", "plain", "compare"])
    parser.add_argument("--model", type=pathlib.Path, default=engines.SAMPLE)
    parser.add_argument("--server", type=pathlib.Path, default=served.SERVER)
    parser.add_argument("--peer", type=pathlib.Path, help="results that `beams.py peer` wrote; default: run the peer")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("/dev/stdout"))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    ir = engines.peer_ir(args.model)
    setup = engines.Setup(
        ir,
        kv_cache_precision="f32",
        stop_tokens=oracle.stop_tokens(ir),
        # Otherwise, the plugin would round activations to 8 bits on some processors.
        peer_properties=("DYNAMIC_QUANTIZATION_GROUP_SIZE=0",),
    )
    results = json.loads(args.peer.read_text()) if args.peer else peer_results(genai.Genai(setup), setup)
    if args.what == "peer":
        args.out.write_text(json.dumps(results) + "\n")
        return
    plain = Plain(genai.Logits(setup))
    if args.what == "plain":
        report(plain_against_peer(plain, setup, results))
    with engines.scratch() as directory, served.Api.start(args.server, setup, args.model, pathlib.Path(directory)) as api:
        report(ours_against_peer(api, plain, setup, results))


def report(found) -> None:
    """Prints the checks and exits."""
    good = True
    for check in found:
        print(f"{'ok  ' if check.good else 'FAIL'} {check.name}: {check.detail}", flush=True)
        good &= check.good
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
