"""Compares the effect of sampling parameters in the server with their effect in openvino_genai, and in a
straightforward implementation that uses the runtime's logits of the same IR."""

from __future__ import annotations

import collections
import dataclasses
import pathlib

import numpy as np

import genai
import oracle
import reference
import served
from oracle import Check, engines

PROMPTS = (0, 3, 5, 13, 22, 45)
OUTPUT_TOKENS = 24
# The tolerance for differences between log probabilities that the server, the peer and the runtime compute from the
# same IR.
LOGPROB_TOLERANCE = 0.005
# The tolerance for tokens of a prompt. Prompts contain improbable tokens, whose log probabilities change by several
# thousandths if activations are rounded to 15 bits.
PROMPT_LOGPROB_TOLERANCE = 0.01
# Two tokens whose logits differ by at most this are a near-tie.
NEAR_TIE = 0.01
DRAWS, SEEDS = 128, (1, 2, 3, 4)
# The maximum deviation of proportions, in standard deviations. With random seeds, one check in thirty thousand would
# exceed this by chance. The seeds are fixed, so each run produces the same draws.
DEVIATION_MAX = 4


@dataclasses.dataclass(frozen=True)
class Penalties:
    """The parameters that change logits, with the names that both APIs use."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def given(self) -> dict:
        """Returns the parameters that have an effect."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value != getattr(Penalties, name)}


PENALTIES = (
    Penalties(),
    Penalties(repetition_penalty=1.3),
    Penalties(repetition_penalty=0.9),
    Penalties(presence_penalty=1.5),
    Penalties(frequency_penalty=0.8),
    Penalties(presence_penalty=-0.5, frequency_penalty=-0.2),
    Penalties(repetition_penalty=1.1, presence_penalty=0.7, frequency_penalty=0.4),
)


@dataclasses.dataclass(frozen=True)
class Filters:
    """The parameters for drawing tokens, with the names that both APIs use."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def name(self) -> str:
        """Returns a description of the parameters for the report."""
        told = [f"{name} {value}" for name, value in dataclasses.asdict(self).items() if value != getattr(Filters, name)]
        return ", ".join(told) or "none"


FILTERS = (
    Filters(top_k=5),
    Filters(temperature=0.6, top_k=20),
    Filters(top_p=0.7),
    Filters(temperature=1.4, top_p=0.6),
    Filters(min_p=0.15),
    Filters(temperature=0.7, min_p=0.05),
    Filters(temperature=1.2, top_k=30, top_p=0.8, min_p=0.02),
)


def penalized(row: np.ndarray, prompt: list[int], output: list[int], penalties: Penalties) -> np.ndarray:
    """Applies penalties as OpenAI, vLLM and Transformers define them: the repetition penalty applies to
    the tokens of the prompt and the output, and the others apply only to those of the output."""
    row = row.astype(np.float64)
    seen = np.asarray(sorted({*prompt, *output}))
    values = row[seen]
    factor = penalties.repetition_penalty
    row[seen] = np.where(values > 0, values / factor, values * factor)
    for token, count in collections.Counter(output).items():
        row[token] -= penalties.presence_penalty + count * penalties.frequency_penalty
    return row


def allowed(row: np.ndarray, filters: Filters) -> dict[int, float]:
    """Returns the tokens that pass the filters, with their probabilities."""
    logits = row.astype(np.float64) / filters.temperature
    order = np.argsort(-logits, kind="stable")
    if filters.top_k > 0:
        order = order[: filters.top_k]
    weights = np.exp(logits[order] - logits[order[0]])
    weights /= weights.sum()
    nucleus = int(np.searchsorted(np.cumsum(weights), filters.top_p)) + 1 if filters.top_p < 1 else len(order)
    kept = [at for at in range(min(nucleus, len(order))) if weights[at] >= filters.min_p * weights[0]]
    total = weights[kept].sum()
    return {int(order[at]): float(weights[at] / total) for at in kept}


def deviation(drawn: collections.Counter[int], expected: dict[int, float]) -> float:
    """Returns the deviation of counts from their expectation, in standard deviations: chi-square with the
    Wilson-Hilferty transformation. Outcomes that are expected fewer than five times are merged."""
    often = [token for token, count in expected.items() if count >= 5]
    pairs = [(drawn[token], expected[token]) for token in often]
    rest = sum(expected.values()) - sum(expected[token] for token in often)
    if rest >= 5:
        pairs.append((sum(drawn.values()) - sum(drawn[token] for token in often), rest))
    free = len(pairs) - 1
    if free < 1:
        return 0.0
    square = sum((count - wanted) ** 2 / wanted for count, wanted in pairs)
    return float(((square / free) ** (1 / 3) - (1 - 2 / (9 * free))) / np.sqrt(2 / (9 * free)))


class Sides:
    """The two engines that are compared, and the logits of the model."""

    def __init__(self, api: served.Api, setup: engines.Setup):
        self.api, self.setup = api, setup
        self.peer, self.logits = genai.Genai(setup), genai.Logits(setup)
        all_prompts = oracle.prompts(setup.model)
        self.prompts = [all_prompts[index] for index in PROMPTS]

    def ours(self, prompt: list[int], **parameters) -> dict:
        """Returns the single choice of a greedy completion."""
        return self.api.completion(prompt, {"max_tokens": OUTPUT_TOKENS} | parameters)["choices"][0]

    def theirs(self, prompt: list[int], **parameters) -> genai.Output:
        """Returns the single output of a greedy request."""
        return self.peer.generate(prompt, {"max_new_tokens": OUTPUT_TOKENS} | parameters)[0]

    def rows(self, prompt: list[int], output: list[int]) -> np.ndarray:
        """Returns the logits from which each token of the output was chosen."""
        return self.logits.all([*prompt, *output])[len(prompt) - 1 : -1]

    def text(self, tokens: list[int], special: bool = False) -> str:
        """Decodes tokens, with or without special tokens."""
        return self.peer.tokenizer.decode(tokens, skip_special_tokens=not special)


def without_stop(tokens: list[int], stops) -> list[int]:
    """Returns an output without the token that ended it, which only one side reports."""
    return tokens[:-1] if tokens and tokens[-1] in stops else tokens


def penalties(sides: Sides, case: Penalties) -> Check:
    """Checks that each of our tokens is the reference's most probable token or a near-tie with it, and that the peer's
    output equals ours or first differs from it at a near-tie."""
    worst, total, identical, unjustified = 0.0, 0, 0, 0
    for prompt in sides.prompts:
        mine = sides.ours(prompt, **case.given())["token_ids"]
        rows = sides.rows(prompt, mine)
        gaps = []
        for at, token in enumerate(mine):
            row = penalized(rows[at], prompt, mine[:at], case)
            gaps.append((row.max() - row[token], row))
        worst, total = max(worst, *(gap for gap, _ in gaps)), total + len(mine)
        other = sides.theirs(prompt, **case.given()).tokens
        cut = [without_stop(one, sides.setup.stop_tokens) for one in (mine, other)]
        at = oracle.first_difference(*cut)
        identical += at is None
        if at is not None and at < min(map(len, cut)):
            row = gaps[at][1]
            unjustified += abs(row[cut[0][at]] - row[cut[1][at]]) > NEAR_TIE
        elif at is not None:
            unjustified += 1
    told = ", ".join(f"{name} {value}" for name, value in case.given().items()) or "no penalty"
    detail = (
        f"{total} tokens are at most {worst:.4f} below the first choice of the reference (tolerance {NEAR_TIE}); "
        f"{identical} of {len(sides.prompts)} outputs equal openvino_genai's, {unjustified} differ where there is no near-tie"
    )
    return Check(f"greedy, {told}", worst <= NEAR_TIE and unjustified == 0, detail)


def logprobs(sides: Sides) -> Check:
    """Compares the log probabilities of the chosen tokens with those of the peer and the runtime, and those of the five
    most probable tokens with those of the runtime."""
    of_peer, of_runtime, of_top, misplaced, total = 0.0, 0.0, 0.0, 0, 0
    for prompt in sides.prompts:
        choice = sides.ours(prompt, logprobs=5, return_tokens_as_token_ids=True)
        # The server reports no log probability for a stop token.
        mine, told = without_stop(choice["token_ids"], sides.setup.stop_tokens), choice["logprobs"]
        expected = reference.log_softmax(sides.rows(prompt, mine))
        peer = sides.theirs(prompt, logprobs=1)
        for at, token in enumerate(mine):
            chosen = told["token_logprobs"][at]
            of_runtime = max(of_runtime, abs(chosen - expected[at][token]))
            if peer.tokens[: at + 1] == mine[: at + 1]:
                of_peer = max(of_peer, abs(chosen - peer.logprobs[at]))
            top = {int(name.removeprefix("token_id:")): value for name, value in told["top_logprobs"][at].items()}
            of_top = max(of_top, *(abs(value - expected[at][one]) for one, value in top.items()))
            fifth = np.sort(expected[at])[-5]
            misplaced += sum(expected[at][one] < fifth - NEAR_TIE for one in top) + (len(top) < 5)
            total += 1
    good = max(of_peer, of_runtime, of_top) <= LOGPROB_TOLERANCE and misplaced == 0 and total > 0
    detail = (
        f"{total} tokens: log probabilities within {of_peer:.5f} of openvino_genai's and {of_runtime:.5f} of the runtime's, "
        f"five most probable tokens within {of_top:.5f} (tolerance {LOGPROB_TOLERANCE}), {misplaced} tokens not among the five"
    )
    return Check("logprobs", good, detail)


def echo(sides: Sides) -> Check:
    """Compares the log probabilities and the text of prompts with those of the runtime and the peer."""
    of_runtime, of_peer, faults, total = 0.0, 0.0, 0, 0
    for prompt in sides.prompts:
        choice = sides.ours(prompt, echo=True, logprobs=1, max_tokens=2, return_tokens_as_token_ids=True)
        told = choice["logprobs"]["token_logprobs"]
        expected = reference.log_softmax(sides.logits.all(prompt))
        peer = sides.theirs(prompt, echo=True, logprobs=1, max_new_tokens=2)
        faults += told[0] is not None
        faults += peer.tokens[: len(prompt)] != prompt
        for at in range(1, len(prompt)):
            of_runtime = max(of_runtime, abs(told[at] - expected[at - 1][prompt[at]]))
            of_peer = max(of_peer, abs(told[at] - peer.logprobs[at]))
            total += 1
        faults += not choice["text"].startswith(sides.text(prompt, special=True))
    good = max(of_runtime, of_peer) <= PROMPT_LOGPROB_TOLERANCE and faults == 0 and total > 0
    detail = (
        f"log probabilities of {total} prompt tokens within {of_runtime:.5f} of the runtime's and {of_peer:.5f} of "
        f"openvino_genai's (tolerance {PROMPT_LOGPROB_TOLERANCE}), {faults} faults"
    )
    return Check("echo with logprobs", good, detail)


def min_tokens(sides: Sides) -> Check:
    """Checks that each output has the minimum length, and that each token before that length is the most probable token
    that is not a stop token, or a near-tie with it."""
    stops = [int(sides.peer.tokenizer.encode(text).input_ids.data[0][0]) for text in (".", ",", "\n")]
    least, worst, early, identical, used = 12, 0.0, 0, 0, 0
    for prompt in sides.prompts:
        bare = sides.ours(prompt, stop_token_ids=stops)["token_ids"]
        mine = sides.ours(prompt, stop_token_ids=stops, min_tokens=least)["token_ids"]
        used += len(bare) < least
        banned = [*stops, *sides.setup.stop_tokens]
        early += any(token in banned for token in mine[:least]) or len(mine) < least
        for at, row in enumerate(sides.rows(prompt, mine)[:least]):
            row = row.copy()
            row[banned] = -np.inf
            worst = max(worst, float(row.max() - row[mine[at]]))
        peer = sides.theirs(prompt, stop_token_ids=stops, min_new_tokens=least).tokens
        identical += without_stop(mine, banned) == without_stop(peer, banned)
    detail = (
        f"{used} of {len(sides.prompts)} outputs would have been shorter, {early} ended early; tokens are at most {worst:.4f} "
        f"below the best one that is not a stop token; {identical} outputs equal openvino_genai's"
    )
    return Check("min_tokens", used > 0 and early == 0 and worst <= NEAR_TIE, detail)


def stop_strings(sides: Sides, kept: bool) -> Check:
    """Checks that the text generated with stop strings is the text generated without them up to the first stop string,
    which is included if `kept`."""
    faults, cut, identical, notes = 0, 0, 0, []
    for prompt in sides.prompts:
        whole = sides.ours(prompt)["text"]
        for stop in (["."], [" is", "France"], ["zzz"]):
            found = [(whole.find(one), one) for one in stop if one in whole]
            expected = whole
            if found:
                at, first = min(found)
                expected, cut = whole[: at + (len(first) if kept else 0)], cut + 1
            mine = sides.ours(prompt, stop=stop, include_stop_str_in_output=kept)
            wrong = mine["text"] != expected or (mine["finish_reason"] == "stop") < bool(found)
            faults += wrong
            if wrong:
                notes.append(f"{stop}: {mine['text']!r}, not {expected!r}")
            peer = sides.theirs(prompt, stop_strings=stop, include_stop_str_in_output=kept)
            # The peer removes whitespace before the stop string.
            identical += sides.text(peer.tokens).rstrip() == mine["text"].rstrip()
    total = 3 * len(sides.prompts)
    detail = (
        f"{total} texts, {cut} of them cut, {faults} wrong; {identical} equal openvino_genai's except for trailing whitespace"
    )
    name = "stop strings, " + ("kept" if kept else "left out")
    return Check(name, faults == 0 and cut > 0, "; ".join([detail, *notes]))


def choices(sides: Sides) -> Check:
    """Checks `n`: greedy choices are equal; choices with a seed are reproducible and not all equal."""
    faults = 0
    for prompt in sides.prompts:
        alone = sides.ours(prompt)["token_ids"]
        several = sides.api.completion(prompt, {"max_tokens": OUTPUT_TOKENS, "n": 5})["choices"]
        faults += [one["token_ids"] for one in several] != [alone] * 5
        drawn = {"max_tokens": OUTPUT_TOKENS, "n": 5, "temperature": 1.0, "top_k": 0, "seed": 7}
        first, second = (
            [one["token_ids"] for one in sides.api.completion(prompt, drawn)["choices"]] for _ in range(2)
        )
        faults += first != second
        faults += len({tuple(one) for one in first}) < 2
    return Check("n", faults == 0, f"{len(sides.prompts)} prompts, 5 choices each, {faults} faults")


def filters(sides: Sides, case: Filters) -> Check:
    """Checks the first tokens that both engines draw: the reference filters must allow all of them, and ours must have
    the expected proportions."""
    outside, of_peer, worst, tokens = 0, 0, 0.0, 0
    for prompt in sides.prompts[:3]:
        row = sides.logits.after(prompt)
        wanted = allowed(row, case)
        # Rounding may include or exclude tokens exactly at the threshold.
        edge = {*wanted, *allowed(row, dataclasses.replace(case, top_p=min(1.0, case.top_p + 1e-4)))}
        drawn: collections.Counter[int] = collections.Counter()
        for seed in SEEDS:
            parameters = dataclasses.asdict(case) | {"n": DRAWS, "max_tokens": 1, "seed": seed}
            answer = sides.api.completion(prompt, parameters)
            drawn.update(choice["token_ids"][0] for choice in answer["choices"])
        outside += sum(token not in edge for token in drawn)
        total = sum(drawn.values())
        worst = max(worst, deviation(drawn, {token: share * total for token, share in wanted.items()}))
        given = {name: value for name, value in dataclasses.asdict(case).items() if value != getattr(Filters, name)}
        more = {"do_sample": True, "num_return_sequences": DRAWS, "max_new_tokens": 1, "rng_seed": 1}
        peer = sides.peer.generate(prompt, given | more)
        of_peer += sum(one.tokens[0] not in edge for one in peer)
        tokens += len(wanted)
    detail = (
        f"filters leave {tokens} tokens; {outside} others were drawn, {of_peer} by openvino_genai; proportions of "
        f"{DRAWS * len(SEEDS)} draws deviate by at most {worst:.1f} standard deviations (at most {DEVIATION_MAX})"
    )
    return Check(f"filters: {case.name()}", outside == 0 and of_peer == 0 and worst <= DEVIATION_MAX, detail)


def checks(server: pathlib.Path, setup: engines.Setup, model: pathlib.Path, directory: pathlib.Path):
    """Runs all checks on the server and the peer with the same IR, one request at a time."""
    with served.Api.start(server, setup, model, directory) as api:
        sides = Sides(api, setup)
        found = [
            *((penalties, case) for case in PENALTIES),
            (logprobs,),
            (echo,),
            (min_tokens,),
            (stop_strings, False),
            (stop_strings, True),
            (choices,),
            *((filters, case) for case in FILTERS),
        ]
        for check, *arguments in found:
            made = check(sides, *arguments)
            yield dataclasses.replace(made, name=f"against openvino_genai and the reference implementation: {made.name}")
