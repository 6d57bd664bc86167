"""Runs our server on an IR directory and uses it over HTTP."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import sys
import urllib.error
import urllib.request

import gguf

from oracle import engines

sys.path.insert(0, str(engines.PEER.parent))

import bench_http

SERVER = bench_http.SERVER
ANSWER_SECONDS_MAX = 300


def tokenizer_of(model: gguf.GGUFReader) -> dict:
    """Returns the `tokenizer.json` for a GGUF file with the tokenizer of SmolLM2: byte-level BPE that splits numbers
    into digits."""
    value = {field.name: field.contents() for field in model.fields.values() if field.name.startswith("tokenizer.")}
    if (value["tokenizer.ggml.model"], value["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise engines.Failed("only the tokenizer of SmolLM2 can be converted to tokenizer.json")
    tokens, types = value["tokenizer.ggml.tokens"], value["tokenizer.ggml.token_type"]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    splits = [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ]
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": at, "content": token} | special
            for at, (token, kind) in enumerate(zip(tokens, types))
            if kind == gguf.TokenType.CONTROL
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: at for at, token in enumerate(tokens)},
            "merges": value["tokenizer.ggml.merges"],
        },
    }


def ir_directory(ir: pathlib.Path, model: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """Returns a directory that our server can load: the IR, and the tokenizer of the GGUF file from which the IR was
    converted."""
    made = directory / "ir"
    made.mkdir()
    for name in ("openvino_model.xml", "openvino_model.bin"):
        (made / name).symlink_to((ir / name).resolve())
    reader = gguf.GGUFReader(str(model))
    (made / "tokenizer.json").write_text(json.dumps(tokenizer_of(reader)))
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    end = reader.fields["tokenizer.ggml.eos_token_id"].contents()
    (made / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokens[end]}))
    return made


class Api:
    """A running server."""

    def __init__(self, running: bench_http.Server):
        self.port = running.port

    @staticmethod
    @contextlib.contextmanager
    def start(server: pathlib.Path, setup: engines.Setup, model: pathlib.Path, directory: pathlib.Path):
        """Starts the server on the IR of `setup`, which was converted from the GGUF file `model`."""
        directory = ir_directory(setup.model, model, directory)
        setup = dataclasses.replace(setup, model=directory, max_chunk_tokens=setup.max_num_batched_tokens)
        with bench_http.Server(server, setup, directory) as running:
            yield Api(running)

    def completion(self, prompt: list[int] | str, parameters: dict) -> dict:
        """Sends a request to `/v1/completions`, greedy by default, and returns the response, which contains the tokens
        of each choice."""
        body = {"model": bench_http.MODEL, "prompt": prompt, "temperature": 0, "return_token_ids": True} | parameters
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS_MAX) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise engines.Failed(f"{parameters}: {error.code} {error.read().decode()}") from error
