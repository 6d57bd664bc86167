#!/usr/bin/env python3
"""`make bench-images`: compares the server with openvino_genai on requests with images, in alternating runs (medians of
the rounds).

Both load the same directory: a vision-language model with random weights (make_vision_model.py). The server runs with
its defaults, except for the size of the KV cache, and receives the images in chat completions over HTTP, as PNG files
in data: URLs. openvino_genai runs in process and receives rendered prompts and decoded pixels, so HTTP, JSON, PNG and
the chat template cost it nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import urllib.request

import bench_engine
import bench_vllm
import engines
import gguf
import http_load
import numpy as np
import plot
from bench_http import MODEL, Server, free_ports
from cases import medians, quantile
from image_cases import CASES, Case, Message, Request, Scenario, chat_messages, data_url, scenario

SECTION = "bench-images"
SERVER = engines.ROOT / "target" / "release" / "ovfleet-server"
PEER = pathlib.Path(__file__).with_name("peer_images.py")
MAKER = pathlib.Path(__file__).with_name("make_vision_model.py")
VENV = engines.DEPS / "venv-vision"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
ENGINES = ("ovfleet", "peer")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--server", type=pathlib.Path, default=SERVER)
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--resume", action="store_true", help="add the rounds to those of the last run, which must be of the same version")
    parser.add_argument("--section", default=SECTION, help="the section of the document that --update replaces")
    parser.add_argument("--update", action="store_true", help="write the table to results.md, and record the raw results")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 if a ratio misses its target")
    return parser.parse_args()


def vision_model() -> pathlib.Path:
    """Returns the directory of the model, and creates the model if it does not exist."""
    directory = engines.WORK / "random-vision-int8"
    if (directory / "complete").exists():
        return directory
    reader = gguf.GGUFReader(engines.SAMPLE)
    values = {name: field.contents() for name, field in reader.fields.items()}
    tokenizer = engines.WORK / "random-vision-tokenizer.json"
    tokenizer.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.write_text(json.dumps(bench_vllm.tokenizer(values)))
    python = VENV / "bin" / "python"
    subprocess.run([python, MAKER, tokenizer, directory], check=True)
    (directory / "complete").touch()
    return directory


class DefaultServer(Server):
    """The server with its defaults, except for the size of the KV cache, which is that of the peer."""

    def command(self) -> list[str]:
        self.port, grpc_port = free_ports(2)
        return [
            str(self.binary),
            f"--model={self.setup.model}",
            f"--model-name={MODEL}",
            f"--port={self.port}",
            f"--grpc-port={grpc_port}",
            f"--kv-cache-size={self.setup.kv_cache_gib}GiB",
        ]

    def metric(self, name: str) -> float:
        """Returns the sum of a metric over all labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def cpu_seconds(self) -> float:
        """Returns the processor time of the process so far."""
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_peak(self) -> int:
        """Returns the largest resident memory of the process so far."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


class Stream(http_load.Stream):
    """A stream that retains all data that it receives, with the time at which each piece arrived."""

    def __init__(self, message: bytes, done: asyncio.Future):
        super().__init__(message, done)
        self.data: list[tuple[float, bytes]] = []

    def data_received(self, data: bytes) -> None:
        self.data.append((asyncio.get_running_loop().time(), data))
        super().data_received(data)


def read_tokens(data: list[tuple[float, bytes]]) -> list[tuple[float, int]]:
    """Returns the tokens of a stream of events, each with the time at which its event was complete."""
    tokens, rest = [], b""
    for time, part in data:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens += [(time, token) for token in choice.get("token_ids") or []]
    return tokens


def http_message(port: int, request: Request, urls: list[str]) -> bytes:
    """Encodes a request as an HTTP message."""
    body = json.dumps({
        "model": MODEL,
        "messages": chat_messages(request, urls),
        "max_tokens": request.max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def send_all(port: int, requests: list[Request], urls: list[str]) -> dict:
    """Sends each request once the request with the index `after` has ended, and returns results in the format of the
    peer."""
    loop = asyncio.get_running_loop()
    ended = [loop.create_future() for _ in requests]
    messages = [http_message(port, request, urls) for request in requests]
    start = loop.time()

    async def one(index: int) -> dict:
        after = requests[index].after
        if after is not None:
            await ended[after]
        arrived, done = loop.time(), loop.create_future()
        _, stream = await loop.create_connection(lambda: Stream(messages[index], done), "127.0.0.1", port)
        error = await done
        ended[index].set_result(None)
        if error is not None:
            raise engines.Failed(f"a request failed: {error}")
        tokens = read_tokens(stream.data)
        times = [time - start for time, _ in tokens]
        return {"arrived": arrived - start, "tokens": [token for _, token in tokens], "times": times}

    results = await asyncio.gather(*(one(index) for index in range(len(requests))))
    return {"seconds": max(result["times"][-1] for result in results), "requests": results}


def prompt_of(request: Request) -> str:
    """Renders the messages as the chat template of the model does."""

    def part(message: Message) -> str:
        return f"<|im_start|>{message.role}\n{IMAGE if message.image is not None else ''}{message.text}<|im_end|>\n"

    return "".join(map(part, request.messages)) + "<|im_start|>assistant\n"


def as_json(request: Request) -> dict:
    """Returns a request in the format of the peer."""
    images = [message.image for message in request.messages if message.image is not None]
    return {"prompt": prompt_of(request), "images": images, "max_tokens": request.max_tokens, "after": request.after}


def measure(case: Case, work: Scenario, result: dict) -> dict:
    """Returns the results of a run: the figure of the case, delays, resource usage, and the tokens."""
    rows = result["requests"]
    for request, row in zip(work.requests, rows):
        if len(row["tokens"]) != request.max_tokens:
            raise engines.Failed(f"a response has {len(row['tokens'])} tokens instead of {request.max_tokens}")
    waits = [row["times"][0] - row["arrived"] for row in rows]
    gaps = [later - earlier for row in rows for earlier, later in zip(row["times"], row["times"][1:])]
    later_waits = [wait for request, wait in zip(work.requests, waits) if request.turn > 0]
    tokens_per_second = sum(len(row["tokens"]) for row in rows) / result["seconds"]
    return {
        "figure": waits[1] if case.is_time else tokens_per_second,
        "tokens_per_second": tokens_per_second,
        "first_token_mean": statistics.mean(waits),
        "first_token_first_turn": waits[0],
        "first_token_later_turns": statistics.median(later_waits or waits),
        "gap_p50": quantile(gaps, 0.5),
        "gap_p99": quantile(gaps, 0.99),
        "cpu_seconds": result["cpu_seconds"],
        "memory_peak_bytes": result["memory_peak_bytes"],
        # Only our server reports how long its image encoder takes.
        "encode_seconds": result.get("encode_seconds", 0.0),
        "tokens": [row["tokens"] for row in rows],
    }


class Bench:
    """The two engines and their settings."""

    def __init__(self, args: argparse.Namespace, directory: pathlib.Path):
        self.server, self.directory = args.server, directory
        precision = engines.served_precision()
        self.setup = engines.Setup(vision_model(), inference_precision=precision, prefix_caching=True)
        self.configs: dict[str, dict] = {}

    def ours(self, work: Scenario) -> dict:
        """Runs a scenario on a new server."""
        urls = [data_url(image) for image in work.images]
        with DefaultServer(self.server, self.setup, self.directory) as server:
            asyncio.run(send_all(server.port, work.warmup, urls))
            encode = "ovfleet_server_image_encode_time_seconds"
            before, began = [server.metric(f"{encode}_{part}") for part in ("sum", "count")], server.cpu_seconds()
            result = asyncio.run(send_all(server.port, work.requests, urls))
            seconds, count = (server.metric(f"{encode}_{part}") - was for part, was in zip(("sum", "count"), before))
            result |= {"cpu_seconds": server.cpu_seconds() - began, "memory_peak_bytes": server.memory_peak()}
            result["encode_seconds"] = seconds / max(count, 1)
        self.configs["ovfleet"] = {"flags": f"--kv-cache-size={self.setup.kv_cache_gib}GiB"}
        return result

    def peer(self, work: Scenario) -> dict:
        """Runs a scenario on openvino_genai."""
        np.save(self.directory / "scenario.npy", np.stack(work.images))
        scenario = {
            "warmup": [as_json(request) for request in work.warmup],
            "requests": [as_json(request) for request in work.requests],
        }
        result = engines.run_peer(self.setup, scenario, self.directory, PEER)
        self.configs["openvino_genai"] = result["config"]
        return result

    def round(self, case: Case, seed: int) -> dict[str, dict]:
        """Runs a case once with each engine, in an order that alternates from round to round."""
        work = scenario(case, seed)
        runs = [("ovfleet", self.ours), ("peer", self.peer)]
        measured = {}
        for name, run in runs if seed % 2 else reversed(runs):
            measured[name] = measure(case, work, run(work))
            note = f"  {case.name:5} round {seed + 1}  {name:8} {measured[name]['figure']:8.3f}"
            print(note, file=sys.stderr, flush=True)
        return measured


HEAD = (
    "| case | ovfleet | openvino_genai | ratio | target | first token mean, ms | between tokens p50, ms "
    "| processor time, s | equal answers |\n" + "|---" * 9 + "|"
)


def row_of(case: Case, rounds: list[dict]) -> tuple[str, bool]:
    """Returns a row of the table, and whether the ratio meets the target."""
    numbers = [{name: {k: v for k, v in each[name].items() if k != "tokens"} for name in ENGINES} for each in rounds]
    ours, peer = (medians([each[name] for each in numbers]) for name in ENGINES)
    ratio = statistics.median(each["ovfleet"]["figure"] / each["peer"]["figure"] for each in rounds)
    good = ratio <= case.wanted if case.is_time else ratio >= case.wanted
    pairs = [pair for each in rounds for pair in zip(each["ovfleet"]["tokens"], each["peer"]["tokens"])]
    equal = sum(ours == peer for ours, peer in pairs)
    cells = [case.title]
    cells += [f"{each['figure'] * 1000:.0f} ms" if case.is_time else f"{each['figure']:.1f} tok/s" for each in (ours, peer)]
    cells += [f"**{ratio:.2f}**", f"{'≤' if case.is_time else '≥'} {case.wanted:.2f} {'✓' if good else '✗'}"]
    cells += [bench_engine.pair(ours, peer, key) for key in ("first_token_mean", "gap_p50")]
    cells.append(" / ".join(f"{each['cpu_seconds']:.1f}" for each in (ours, peer)))
    return f"| {' | '.join([*cells, f'{equal} of {len(pairs)}'])} |", good


def text_of(bench: Bench, measured: dict[str, list[dict]]) -> tuple[str, bool]:
    """Returns the text of the section, and whether all ratios meet their targets."""
    rounds = min(map(len, measured.values()))
    lines = [f"{datetime.date.today()}; {engines.versions()}.", f"Machine: {engines.machine()}.", ""]
    lines += [
        f"Model: {bench.setup.model.name}. Speeds and times are medians of {rounds} rounds; values separated by a slash are "
        "those of ovfleet and openvino_genai."
    ]
    lines += [f"- {name}: {json.dumps(config)}" for name, config in sorted(bench.configs.items())]
    lines += ["", HEAD]
    all_good = True
    for case in CASES:
        if case.name in measured:
            row, good = row_of(case, measured[case.name])
            lines.append(row)
            all_good &= good
    if "turns" in measured:
        waits = [{name: each[name]["first_token_later_turns"] for name in ENGINES} for each in measured["turns"]]
        ratio = statistics.median(each["ovfleet"] / each["peer"] for each in waits)
        times = " / ".join(f"{statistics.median(each[name] for each in waits) * 1000:.0f}" for name in ENGINES)
        title = "median time to the first token in the second to fifth turns"
        lines += ["", f"- {title}: {times} ms, **{ratio:.2f}** times that of openvino_genai"]
    else:
        lines.append("")
    encode = {case: [each["ovfleet"]["encode_seconds"] for each in rounds] for case, rounds in measured.items()}
    titles = {"c1": "1 at a time", "c8": "8 concurrent", "turns": "conversations"}
    times = ", ".join(f"{statistics.median(each):.1f} s ({titles[case]})" for case, each in encode.items())
    lines.append(f"- ovfleet's encoding time per image: {times}")
    return "\n".join(lines), all_good


def record(bench: Bench, measured: dict[str, list[dict]], path: pathlib.Path) -> None:
    """Writes the raw results in the format of bench_engine.py."""
    content = {
        "date": str(datetime.date.today()),
        "versions": engines.versions(),
        "machine": engines.machine(),
        "model": bench.setup.model.name,
        "configs": bench.configs,
        "titles": {"ovfleet": "the same files"},
        "cases": {case.name: case.title for case in CASES if case.name in measured and not case.is_time},
        "measured": measured,
    }
    path.write_text(json.dumps(content) + "\n")


def main() -> None:
    args = arguments()
    if not args.server.is_file():
        raise SystemExit(f"{args.server} does not exist: build it with `make build`")
    last_run = engines.WORK / f"{args.section}.json"
    earlier = json.loads(last_run.read_text()) if args.resume else {"measured": {}, "configs": {}}
    measured: dict[str, list[dict]] = earlier["measured"]
    with engines.scratch() as directory:
        bench = Bench(args, pathlib.Path(directory))
        bench.configs |= earlier["configs"]
        for _ in range(args.rounds):
            for case in CASES:
                if case.name in args.cases:
                    rounds = measured.setdefault(case.name, [])
                    rounds.append(bench.round(case, seed=len(rounds)))
                    record(bench, measured, last_run)
    text, good = text_of(bench, measured)
    print(text)
    if args.update:
        bench_engine.RECORDS.mkdir(parents=True, exist_ok=True)
        path = bench_engine.RECORDS / last_run.name
        path.write_bytes(last_run.read_bytes())
        plot.write(path)
        bench_engine.update(args.section, text)
    if args.strict and not good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
