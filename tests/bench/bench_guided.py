#!/usr/bin/env python3
"""`make bench-guided`: compares requests with a JSON schema to requests without a schema (medians of the rounds).

The prompts of both kinds have the same lengths. Both kinds alternate on one server, so that other load on the machine
affects both. No answer can satisfy the schema before the token limit, so both kinds generate the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import bench_http
import cases
import engines
from bench_http import Server, throughput
from bench_lookup import print_ratios, rounds_of

WANTED = 0.9
CASES = [case for case in cases.CASES if case.name in ("c1", "c8", "c32", "c64")]
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["book", "film", "song"]},
        "price": {"type": "number", "minimum": 0, "maximum": 1000},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2030},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "sold": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string", "maxLength": 40}, {"type": "null"}]},
    },
    "required": ["name", "kind", "price", "year", "tags", "sold", "note"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": ITEM, "minItems": 500}},
    "required": ["items"],
    "additionalProperties": False,
}
GUIDED = {"response_format": {"type": "json_schema", "json_schema": {"name": "stock", "schema": SCHEMA}}}


def arguments() -> argparse.Namespace:
    known = bench_http.parser(__doc__, [case.name for case in CASES], ["c1", "c8", "c32"])
    known.add_argument("--temperature", type=float, default=0.0)
    return known.parse_args()


def main() -> None:
    args = arguments()
    setup = bench_http.setup_of(args)
    measured = {}
    with engines.scratch() as directory, Server(args.server, setup, pathlib.Path(directory)) as server:
        warmup = cases.scenario(CASES[1], 99, args.vocabulary)
        for more in ({}, GUIDED):
            throughput(server.port, warmup["requests"], more)
        for case in (case for case in CASES if case.name in args.cases):

            def figure_of(kind: str, seed: int) -> float:
                is_guided = kind == "guided"
                # Each run has different prompts of the same lengths, so that none is in the prefix cache.
                work = cases.scenario(case, 2 * seed + is_guided, args.vocabulary)
                more = {"temperature": args.temperature} | (GUIDED if is_guided else {})
                return throughput(server.port, work["requests"], more)

            measured[case.name] = rounds_of(args.rounds, f"{case.name:4}", ("guided", "plain"), figure_of)
    (engines.WORK / "bench-guided.json").write_text(json.dumps(measured, indent=1))
    print(f"{engines.versions()}\n{engines.machine()}\n")
    titles = {case.name: case.title for case in CASES}
    all_good = print_ratios(("case", "guided", "not guided"), titles, measured, lambda _: WANTED)
    if args.strict and not all_good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
