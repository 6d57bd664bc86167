#!/usr/bin/env python3
"""`make bench-vllm`: compares the server with vLLM on the CPU, over HTTP. The runs alternate between the two servers,
and the table contains the medians of the rounds.

The same client sends the same prompts, as token IDs, to both servers, with greedy sampling and `ignore_eos`. Both use
the same number of threads, token budget per step, cache size and setting for prefix caching. vLLM cannot load GGUF
files on a CPU, so it serves the dequantized weights in the precision that our server computes in, with a KV cache in
the same precision.
"""

from __future__ import annotations

import collections.abc
import json
import os
import pathlib
import re

import engines
import gguf
import numpy as np
from bench_http import MODEL, Server, free_ports
from bench_llama import Contender, beside

VENV = engines.DEPS / "venv-vllm"
# The directory in which vLLM caches compiled kernels, so that later starts reuse them.
CACHE = engines.WORK / "vllm-cache"
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
# An upper bound for the total number of tokens of a prompt and its response.
CONTEXT = 2048

# Map the tensor names in GGUF files of the llama architecture to those in Hugging Face models.
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# The type of control tokens in GGUF files.
CONTROL = 3


class Vllm(Server):
    """Starts vLLM's server, configured not to access the internet."""

    health = "/health"

    def command(self) -> list[str]:
        (self.port,) = free_ports(1)
        setup = self.setup
        processors = sorted(os.sched_getaffinity(0))[: setup.threads]
        environment = {
            "HF_HUB_OFFLINE": 1,
            # The documentation of vLLM recommends this setting.
            "LD_PRELOAD": VENV / "lib" / "libiomp5.so",
            "TORCHINDUCTOR_CACHE_DIR": CACHE / "inductor",
            "VLLM_CACHE_ROOT": CACHE,
            "VLLM_CPU_KVCACHE_SPACE": setup.kv_cache_gib,
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors)),
            "VLLM_DO_NOT_TRACK": 1,
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": 1,
            # Disabled, because vLLM would otherwise fail to load its cached graphs and recompile them at each start.
            "VLLM_USE_AOT_COMPILE": 0,
        }
        options = {
            "--model": setup.model,
            "--served-model-name": MODEL,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--dtype": DTYPES[setup.inference_precision],
            "--max-model-len": CONTEXT,
            "--max-num-batched-tokens": setup.max_num_batched_tokens,
        }
        return [
            "env",
            *(f"{key}={value}" for key, value in environment.items()),
            str(VENV / "bin" / "python"),
            # `vllm serve` reads the version of the package `vllm`, but the installed package is called `vllm-cpu`.
            "-m",
            "vllm.entrypoints.openai.api_server",
            *(str(part) for option in options.items() for part in option),
            "--enable-prefix-caching" if setup.prefix_caching else "--no-enable-prefix-caching",
        ]


def dequantized(model: pathlib.Path) -> pathlib.Path:
    """Converts a GGUF file to a model directory in the format of Hugging Face, and returns the directory. A file is
    converted only once."""
    directory = engines.WORK / f"hf-{model.stem}"
    if (directory / "complete").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(model)
    values = {name: field.contents() for name, field in reader.fields.items()}
    if values["general.architecture"] != "llama":
        raise SystemExit(f"{model} does not have the architecture llama, the only one that is converted for vLLM")
    names = [tensor.name for tensor in reader.tensors]
    for name, content in (
        ("config.json", configuration(values, is_tied="output.weight" not in names)),
        ("tokenizer.json", tokenizer(values)),
        ("tokenizer_config.json", tokenizer_configuration(values)),
    ):
        (directory / name).write_text(json.dumps(content))
    write_weights(directory / "model.safetensors", reader.tensors, values)
    (directory / "complete").touch()
    return directory


def configuration(values: dict, is_tied: bool) -> dict:
    """Returns the configuration of the model."""
    heads = values["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": values["llama.embedding_length"],
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": values["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "head_dim": values["llama.embedding_length"] // heads,
        "max_position_embeddings": values["llama.context_length"],
        "rms_norm_eps": values["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": values["llama.rope.freq_base"]},
        "tie_word_embeddings": is_tied,
        "vocab_size": len(values["tokenizer.ggml.tokens"]),
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
    }


def tokenizer(values: dict) -> dict:
    """Returns the `tokenizer.json` of a byte-level BPE tokenizer. In this benchmark, the tokenizer only decodes
    answers, because prompts are sent as tokens."""
    if values["tokenizer.ggml.model"] != "gpt2":
        raise SystemExit("only byte-pair tokenizers are converted for vLLM")
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    plain = {"normalized": False, "single_word": False, "lstrip": False, "rstrip": False, "special": True}
    added = [number for number, kind in enumerate(kinds) if kind == CONTROL]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [plain | {"id": number, "content": tokens[number]} for number in added],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": values["tokenizer.ggml.merges"],
        },
    }


def tokenizer_configuration(values: dict) -> dict:
    """Returns the content of `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": values["tokenizer.ggml.tokens"][values["tokenizer.ggml.eos_token_id"]],
    }


def write_weights(path: pathlib.Path, tensors: collections.abc.Sequence, values: dict) -> None:
    """Writes all tensors in bf16 to a safetensors file, which consists of the header's length, the header and the
    values."""
    header, end = {}, 0
    for tensor in tensors:
        start, end = end, end + 2 * int(tensor.n_elements)
        shape = [int(size) for size in reversed(tensor.shape)]
        header[renamed(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(in_bf16(in_halves(tensor, values)).tobytes())


def renamed(name: str) -> str:
    """Returns the name of a tensor in the Hugging Face model. An unknown tensor is an error."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if layer and layer[2] in LAYER:
        return f"model.layers.{layer[1]}.{LAYER[layer[2]]}.weight"
    if name.removesuffix(".weight") in OUTSIDE:
        return f"{OUTSIDE[name.removesuffix('.weight')]}.weight"
    raise SystemExit(f"the tensor {name} is not supported by the conversion for vLLM")


def in_halves(tensor: gguf.ReaderTensor, values: dict) -> np.ndarray:
    """Returns the tensor in f32. In Hugging Face models, each head's query and key projections consist of two halves,
    which GGUF files of the llama architecture interleave for RoPE. This function restores the halves."""
    weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    heads = {
        "attn_q": values["llama.attention.head_count"],
        "attn_k": values["llama.attention.head_count_kv"],
    }.get(tensor.name.split(".")[-2])
    if heads is None:
        return weights
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def in_bf16(weights: np.ndarray) -> np.ndarray:
    """Rounds f32 to bf16, ties to even."""
    bits = np.ascontiguousarray(weights).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def main() -> None:
    requirements = (VENV / "requirements.installed").read_text()
    version = re.search(r"^vllm-cpu==\S+", requirements, re.M)[0].replace("==", " ")
    vllm = Contender("vLLM", lambda _case, setup: (Vllm, setup.with_model(dequantized(setup.model))))
    beside(__doc__, version, vllm)


if __name__ == "__main__":
    main()
