#!/usr/bin/env python3
"""The peer of bench_images.py: runs requests with images on openvino_genai, in process.

The pipeline is `openvino_genai.ContinuousBatchingPipeline`, the engine of OpenVINO Model Server. As in that server,
each request is added in a separate thread, in which the pipeline encodes the request's images, while another thread
runs `step()`. The time of a token is the end of its step. The input is a JSON file with the rendered prompts, and a
file with the pixels of the images.
"""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import resource
import threading
import time

import numpy as np
import openvino as ov
import openvino_genai
from peer import GIB, head, memory_loaded, parser, pipeline


class Run:
    """A pipeline and its requests."""

    def __init__(self, args):
        self.pipeline = pipeline(args)
        self.images = [ov.Tensor(pixels[None]) for pixels in np.load(pathlib.Path(args.scenario).with_suffix(".npy"))]
        self.added = threading.Condition()
        self.next_id = 0

    def add(self, request: dict, state: dict) -> None:
        """Adds a request. During this call, the pipeline encodes the request's images."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request["max_tokens"]
        config.ignore_eos = True
        config.do_sample = False
        # The prompt is already rendered.
        config.apply_chat_template = False
        images = [self.images[index] for index in request["images"]]
        handle = self.pipeline.add_request(state["id"], request["prompt"], images, config)
        with self.added:
            state["handle"] = handle
            self.added.notify()

    def generate(self, requests: list[dict]) -> dict:
        """Adds each request when it is due, and runs all of them to the end."""
        states = [{"arrived": None, "handle": None, "tokens": [], "times": [], "done": False} for _ in requests]
        start, began = time.perf_counter(), time.process_time()
        with concurrent.futures.ThreadPoolExecutor(len(requests)) as threads:
            adding: list[concurrent.futures.Future] = []
            while not all(state["done"] for state in states):
                for request, state in zip(requests, states):
                    after = request["after"]
                    if state["arrived"] is None and (after is None or states[after]["done"]):
                        self.next_id += 1
                        state |= {"arrived": time.perf_counter() - start, "id": self.next_id}
                        adding.append(threads.submit(self.add, request, state))
                for future in adding:
                    if future.done():
                        future.result()
                if not self.pipeline.has_non_finished_requests():
                    with self.added:
                        self.added.wait(0.005)
                    continue
                self.pipeline.step()
                collect(states, time.perf_counter() - start)
        seconds = time.perf_counter() - start
        cpu_seconds = time.process_time() - began
        # A failed request raises an exception, so no request in the result has an error.
        rows = [{key: state[key] for key in ("arrived", "tokens", "times")} | {"error": None} for state in states]
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "requests": rows}


def collect(states: list[dict], now: float) -> None:
    """Reads the tokens of a step."""
    for state in states:
        handle = state["handle"]
        if handle is None or state["done"]:
            continue
        while handle.can_read():
            for output in handle.read().values():
                state["tokens"] += output.generated_ids
                state["times"] += [now] * len(output.generated_ids)
        state["done"] = handle.get_status() != openvino_genai.GenerationStatus.RUNNING


def main() -> None:
    args = parser(__doc__).parse_args()
    scenario = json.loads(pathlib.Path(args.scenario).read_text())
    result = head(args, "images")
    start = time.perf_counter()
    run = Run(args)
    result["load_seconds"] = time.perf_counter() - start
    result["memory_loaded"] = memory_loaded()
    run.generate(scenario["warmup"])
    result |= run.generate(scenario["requests"])
    result["memory_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pathlib.Path(args.out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
