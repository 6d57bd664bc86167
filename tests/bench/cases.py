"""The cases of the benchmark: the requests, the measured figure, and the target ratio to the peer."""

from __future__ import annotations

import dataclasses
import random
import statistics

PROMPT_TOKENS, OUTPUT_TOKENS = 256, 128
# The sizes of the case in which all prompts have the same prefix, which represents a long system prompt.
PREFIX_TOKENS, OWN_TOKENS, PREFIX_OUTPUT_TOKENS, PREFIX_CONCURRENT = 1024, 64, 64, 16
# The sizes of the case in which a long prompt arrives while other streams decode.
LONG_TOKENS, STREAMS, STREAM_PROMPT_TOKENS, STREAM_OUTPUT_TOKENS, LONG_AFTER_TOKENS = 4096, 8, 64, 256, 16
# The number of requests in the sequential case. A single request would be too short to measure.
SINGLE_REQUESTS = 4
# The smallest token ID in prompts. Smaller IDs may be those of control tokens.
TOKEN_MIN = 300


@dataclasses.dataclass(frozen=True)
class Case:
    """A workload with its target ratio. The table of results has a row for each workload."""

    name: str
    title: str
    # The target ratio of our figure to that of the peer: a minimum for tokens/s, a maximum for a gap.
    wanted: float
    # Whether the figure is the longest gap in seconds instead of tokens per second.
    is_gap: bool = False
    # The number of concurrent requests; 0 for cases with another arrival pattern.
    concurrent: int = 0
    # The --max-itl of our engine in milliseconds.
    max_itl_ms: int | None = None


# The targets apply to processors without AMX.
CASES = (
    Case("c1", "1 at a time", 1.9, concurrent=1),
    Case("c8", "8 concurrent", 1.4, concurrent=8),
    Case("c32", "32 concurrent", 1.4, concurrent=32),
    Case("c64", "64 concurrent", 1.4, concurrent=64),
    Case("prefix", "16 concurrent, shared prefix of 1,024", 2.0),
    # Measured: 60 ms with our engine, and 355 ms with the peer.
    Case("gap", "4k prompt next to 8 streams: longest gap", 0.17, is_gap=True),
    Case("itl", "the same, with `--max-itl 40ms`", 0.17, is_gap=True, max_itl_ms=40),
)


@dataclasses.dataclass(frozen=True)
class Delay:
    """A secondary figure of a case, such as a delay, with the maximum ratio of our figure to the peer's."""

    case: str
    title: str
    key: str
    wanted: float


DELAYS = (
    Delay("c32", "mean time to the first token, 32 concurrent requests", "first_token_mean", 0.8),
    Delay("c32", "99th percentile of the time between tokens, 32 concurrent requests", "gap_p99", 0.7),
    Delay("c32", "peak memory, 32 concurrent requests", "memory_peak_bytes", 1.0),
)


def request(prompt: list[int], max_tokens: int, arrival: dict | None = None) -> dict:
    """Returns a scenario's request, which generates exactly `max_tokens` tokens."""
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "arrival": arrival}


def scenario(case: Case, seed: int, vocabulary: int) -> dict:
    """Returns the scenario of a case. Another seed gives different prompts of the same lengths."""
    rng = random.Random(f"{case.name} {seed}")

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(min(TOKEN_MIN, vocabulary // 2), vocabulary) for _ in range(tokens)]

    warmup = [request(prompt(PROMPT_TOKENS), 8) for _ in range(min(case.concurrent or 8, 8))]
    if case.name == "prefix":
        shared = prompt(PREFIX_TOKENS)
        requests = [request(shared + prompt(OWN_TOKENS), PREFIX_OUTPUT_TOKENS) for _ in range(PREFIX_CONCURRENT)]
    elif case.is_gap:
        requests = [request(prompt(STREAM_PROMPT_TOKENS), STREAM_OUTPUT_TOKENS) for _ in range(STREAMS)]
        arrival = {"after_request": 0, "tokens": LONG_AFTER_TOKENS}
        requests.append(request(prompt(LONG_TOKENS), 8, arrival))
    elif case.concurrent == 1:
        arrivals = [after(index, OUTPUT_TOKENS) for index in range(SINGLE_REQUESTS)]
        requests = [request(prompt(PROMPT_TOKENS), OUTPUT_TOKENS, arrival) for arrival in arrivals]
    else:
        requests = [request(prompt(PROMPT_TOKENS), OUTPUT_TOKENS) for _ in range(case.concurrent)]
    return {"kind": "generate", "warmup": warmup, "requests": requests}


def after(index: int, tokens: int) -> dict | None:
    """Returns the arrival of a request that is sent when the previous one has ended."""
    return {"after_request": index - 1, "tokens": tokens} if index else None


def quantile(values: list[float], share: float) -> float:
    """Returns the value below which the fraction `share` of the values lies."""
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]


def measure(case: Case, result: dict) -> dict:
    """Returns the results of a run: the figure of the case, delays, the load time, and the peak memory."""
    requests = result["requests"]
    output = sum(len(row["tokens"]) for row in requests)
    waits = [row["times"][0] - row["arrived"] for row in requests]
    gaps = [later - earlier for row in requests for earlier, later in zip(row["times"], row["times"][1:])]
    measured = {
        "tokens_per_second": output / result["seconds"],
        "first_token_mean": statistics.mean(waits),
        "first_token_p50": quantile(waits, 0.5),
        "first_token_p99": quantile(waits, 0.99),
        "gap_p50": quantile(gaps, 0.5),
        "gap_p99": quantile(gaps, 0.99),
        "load_seconds": result["load_seconds"],
        "memory_peak_bytes": result["memory_peak_bytes"],
    }
    if case.is_gap:
        arrived = requests[STREAMS]["arrived"]
        measured["figure"] = max(
            later - earlier
            for row in requests[:STREAMS]
            for earlier, later in zip(row["times"], row["times"][1:])
            if later > arrived
        )
    else:
        measured["figure"] = measured["tokens_per_second"]
    return measured


def medians(rows: list[dict]) -> dict:
    """Returns, for each key, the median of its values in the rows."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}
