#!/usr/bin/env python3
"""Starts another router for `make bench-router`: `peer_router.py vllm|sglang ARGUMENTS...`.

Each of the two routers is a Rust program in a Python package, and Python only parses its arguments. This program does
not use the packages' entry points, because they also import a load balancer in Python, which needs additional packages.
`--version` prints the installed version.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys


def main() -> None:
    name = {"vllm": "vllm_router", "sglang": "sglang_router"}[sys.argv[1]]
    if sys.argv[2:] == ["--version"]:
        print(importlib.metadata.version(name.replace("_", "-")))
        return
    arguments = importlib.import_module(f"{name}.router_args").RouterArgs
    router = importlib.import_module(f"{name}.router").Router
    parser = argparse.ArgumentParser()
    arguments.add_cli_args(parser, use_router_prefix=False)
    chosen = arguments.from_cli_args(parser.parse_args(sys.argv[2:]), use_router_prefix=False)
    router.from_args(chosen).start()


if __name__ == "__main__":
    main()
