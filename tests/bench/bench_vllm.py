#!/usr/bin/env python3
"""`make bench-vllm`: our server beside vLLM on the CPU, both over HTTP, alternating, medians of the rounds.

The same prompts of tokens by the same client, greedy, end tokens ignored; the same threads, token budget of a step, size of the
cache and prefix caching. vLLM reads no GGUF file on a CPU: it serves the file's weights dequantised, in the precision that ours
computes in, and keeps its cache in that precision too.
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
# What its kernels are compiled into, so that only the first start compiles.
CACHE = engines.WORK / "vllm-cache"
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
# More than any prompt of the cases with its answer.
CONTEXT = 2048

# Names in GGUF files of the architecture llama, and in Hugging Face's folders.
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
# llama.cpp's number of a token that is never text.
CONTROL = 3


class Vllm(Server):
    """vLLM's server, off the network."""

    health = "/health"

    def command(self) -> list[str]:
        (self.port,) = free_ports(1)
        setup = self.setup
        processors = sorted(os.sched_getaffinity(0))[: setup.threads]
        environment = {
            "HF_HUB_OFFLINE": 1,
            # As its documentation advises.
            "LD_PRELOAD": VENV / "lib" / "libiomp5.so",
            "TORCHINDUCTOR_CACHE_DIR": CACHE / "inductor",
            "VLLM_CACHE_ROOT": CACHE,
            "VLLM_CPU_KVCACHE_SPACE": setup.kv_cache_gib,
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors)),
            "VLLM_DO_NOT_TRACK": 1,
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": 1,
            # It writes whole graphs that it fails to read back, and would compile them anew at each start.
            "VLLM_USE_AOT_COMPILE": 0,
        }
        options = {
            "--model": setup.model,
            "--served-model-name": MODEL,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--dtype": DTYPES[setup.inference_precision],
            "--max-model-len": CONTEXT,
            "--max-num-batched-tokens": setup.batch_tokens_max,
        }
        return [
            "env",
            *(f"{key}={value}" for key, value in environment.items()),
            str(VENV / "bin" / "python"),
            # `vllm serve` asks for the version of a package `vllm`, which this one is not called.
            "-m",
            "vllm.entrypoints.openai.api_server",
            *(str(part) for option in options.items() for part in option),
            "--enable-prefix-caching" if setup.prefix_caching else "--no-enable-prefix-caching",
        ]


def dequantised(model: pathlib.Path) -> pathlib.Path:
    """The Hugging Face folder of a GGUF file's model, made once."""
    folder = engines.WORK / f"hf-{model.stem}"
    if (folder / "complete").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(model)
    values = {name: field.contents() for name, field in reader.fields.items()}
    if values["general.architecture"] != "llama":
        raise SystemExit(f"{model} is no llama, the only architecture that is written anew for vLLM")
    names = [tensor.name for tensor in reader.tensors]
    for name, content in (
        ("config.json", configuration(values, is_tied="output.weight" not in names)),
        ("tokenizer.json", tokenizer(values)),
        ("tokenizer_config.json", tokenizer_configuration(values)),
    ):
        (folder / name).write_text(json.dumps(content))
    write_weights(folder / "model.safetensors", reader.tensors, values)
    (folder / "complete").touch()
    return folder


def configuration(values: dict, is_tied: bool) -> dict:
    """The model's shape."""
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
    """Pairs of bytes that are merged. Prompts come as tokens: it only has to write text."""
    if values["tokenizer.ggml.model"] != "gpt2":
        raise SystemExit("only tokenizers that merge bytes are written anew for vLLM")
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
    """What of a tokenizer is said outside it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": values["tokenizer.ggml.tokens"][values["tokenizer.ggml.eos_token_id"]],
    }


def write_weights(path: pathlib.Path, tensors: collections.abc.Sequence, values: dict) -> None:
    """All tensors in bf16, as safetensors: the length of a header, the header, the numbers."""
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
    """The tensor's name in the folder; one that is not known would make another model."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if layer and layer[2] in LAYER:
        return f"model.layers.{layer[1]}.{LAYER[layer[2]]}.weight"
    if name.removesuffix(".weight") in OUTSIDE:
        return f"{OUTSIDE[name.removesuffix('.weight')]}.weight"
    raise SystemExit(f"the tensor {name} has no place in the model that is written for vLLM")


def in_halves(tensor: gguf.ReaderTensor, values: dict) -> np.ndarray:
    """The tensor in f32. GGUF files have rows of queries and keys in pairs, as they turn together, and others in two halves."""
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
    """The upper halves of f32, rounded to the nearest and in a tie to the even one."""
    bits = np.ascontiguousarray(weights).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def main() -> None:
    requirements = (VENV / "requirements.installed").read_text()
    version = re.search(r"^vllm-cpu==\S+", requirements, re.M)[0].replace("==", " ")
    vllm = Contender("vLLM", lambda _case, setup: (Vllm, setup.with_model(dequantised(setup.model))))
    beside(__doc__, version, vllm)


if __name__ == "__main__":
    main()
