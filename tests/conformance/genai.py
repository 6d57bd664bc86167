"""Runs openvino_genai in this process, one request at a time, with any of its parameters. The module also computes the
logits of the same IR directly in the OpenVINO runtime."""

from __future__ import annotations

import argparse
import dataclasses
import sys

import numpy as np

import oracle
from oracle import engines

sys.path.insert(0, str(engines.PEER.parent))

import peer

STOP_CRITERIA = {True: "EARLY", False: "HEURISTIC", "never": "NEVER"}


@dataclasses.dataclass
class Output:
    """A sequence that was generated for a request."""

    tokens: list[int]
    logprobs: list[float]
    score: float


def namespace(setup: engines.Setup) -> argparse.Namespace:
    """Converts a setup to the arguments of `peer.py`."""
    return argparse.Namespace(
        model=str(setup.model),
        inference_precision=setup.inference_precision,
        kv_cache_precision=setup.kv_cache_precision,
        threads=setup.threads,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        kv_cache_gib=setup.kv_cache_gib,
        stop_token=list(setup.stop_tokens),
        prefix_caching=False,
        property=[*setup.properties, *setup.peer_properties],
    )


class Genai:
    """A pipeline that runs one request at a time."""

    def __init__(self, setup: engines.Setup):
        self.run = peer.Run(namespace(setup))
        self.genai = self.run.genai
        self.tokenizer = self.genai.Tokenizer(str(setup.model))

    def config(self, prompt: list[int], parameters: dict):
        """Returns the configuration for `parameters`, whose names are those of the fields of `GenerationConfig`. The
        only exception is `early_stopping`, which has the name and the values of Transformers' parameter."""
        config = self.genai.GenerationConfig()
        config.apply_chat_template = False
        config.stop_token_ids = self.run.stop_tokens | set(parameters.get("stop_token_ids", ()))
        for name, value in parameters.items():
            if name == "early_stopping":
                config.stop_criteria = getattr(self.genai.StopCriteria, STOP_CRITERIA[value])
            elif name == "stop_strings":
                config.stop_strings = set(value)
            elif name != "stop_token_ids":
                setattr(config, name, value)
        return config

    def generate(self, prompt: list[int], parameters: dict) -> list[Output]:
        """Returns at most `num_return_sequences` sequences of a request, the best first."""
        tensor = peer.ov.Tensor(np.asarray([prompt], dtype=np.int64))
        self.run.next_id += 1
        handle = self.run.pipeline.add_request(self.run.next_id, tensor, self.config(prompt, parameters))
        while self.run.pipeline.has_non_finished_requests():
            self.run.pipeline.step()
        outputs = [
            Output(list(one.generated_ids), list(one.generated_log_probs), float(one.score))
            for one in handle.read_all()
        ]
        outputs.sort(key=lambda one: -one.score)
        return outputs[: parameters.get("num_return_sequences", 1)]


class Logits:
    """The logits of token sequences, computed by the runtime without a pipeline or a sampler."""

    def __init__(self, setup: engines.Setup):
        self.scorer = peer.Scorer(namespace(setup))

    def all(self, tokens: list[int]) -> np.ndarray:
        """Returns a row of logits for the token after each position."""
        return self.scorer.logits(tokens)

    def after(self, tokens: list[int]) -> np.ndarray:
        """Returns the logits for the token after the last position."""
        return self.all(tokens)[-1]
