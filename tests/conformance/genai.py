"""openvino_genai in this process: requests one at a time, with every parameter it has, and the logits of the same IR
from the runtime alone."""

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
    """One of the sequences a request led to."""

    tokens: list[int]
    logprobs: list[float]
    score: float


def namespace(setup: engines.Setup) -> argparse.Namespace:
    """A setup in the words of `peer.py`."""
    return argparse.Namespace(
        model=str(setup.model),
        inference_precision=setup.inference_precision,
        kv_cache_precision=setup.kv_cache_precision,
        threads=setup.threads,
        batch_tokens_max=setup.batch_tokens_max,
        kv_cache_gib=setup.kv_cache_gib,
        stop_token=list(setup.stop_tokens),
        prefix_caching=False,
        property=[*setup.properties, *setup.peer_properties],
    )


class Genai:
    """A pipeline that runs one request after the other."""

    def __init__(self, setup: engines.Setup):
        self.run = peer.Run(namespace(setup))
        self.genai = self.run.genai
        self.tokenizer = self.genai.Tokenizer(str(setup.model))

    def config(self, prompt: list[int], parameters: dict):
        """Parameters by the names of `GenerationConfig`; `early_stopping` as Transformers has it."""
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
        """The sequences of a request, the best first, no more than `num_return_sequences`."""
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
    """Logits of sequences of tokens, computed by the runtime without pipeline and sampler."""

    def __init__(self, setup: engines.Setup):
        self.scorer = peer.Scorer(namespace(setup))

    def all(self, tokens: list[int]) -> np.ndarray:
        """A row for each token: of what follows it."""
        return self.scorer.logits(tokens)

    def after(self, tokens: list[int]) -> np.ndarray:
        """Of what follows all of them."""
        return self.all(tokens)[-1]
