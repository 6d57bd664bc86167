#!/usr/bin/env python3
"""Writes a GGUF file of a model with a billion random 4-bit weights, and prints its path.

The model has the shape of Llama 3.2 1B and the tokenizer of the sample model. Its output is meaningless, but its cost
is that of a real model of this size, so that optimizations are not tuned to the sample model alone. Q4_0 has integer
zero points, so the IR of the peer is the same model.
"""

from __future__ import annotations

import pathlib

import engines
import gguf
import numpy as np

PATH = engines.WORK / "random-1b.Q4_0.gguf"
LAYERS, HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD = 16, 2048, 8192, 32, 8, 64
CONTEXT = 8192
# The bytes of a block of Q4_0: a scale in f16, and 32 values of 4 bits.
BLOCK, BLOCK_BYTES = 32, 18
# With this scale, the product with a normalized vector is about one. Values are uniform from -8 to 7.
SPREAD = 4.6


def matrix(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Returns the bytes of random blocks."""
    blocks = random.integers(0, 256, (rows, columns // BLOCK, BLOCK_BYTES), dtype=np.uint8)
    scale = np.float16(1 / (SPREAD * columns**0.5))
    blocks[:, :, :2] = np.frombuffer(scale.tobytes(), dtype=np.uint8)
    return blocks.reshape(rows, -1)


def metadata(writer: gguf.GGUFWriter) -> int:
    """Writes the shape and the tokenizer of the sample model, and returns the size of the vocabulary."""
    writer.add_name("random 1b Q4_0")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(500_000.0)
    sample = gguf.GGUFReader(engines.SAMPLE)
    for name, field in sample.fields.items():
        if name.startswith("tokenizer."):
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    size = len(sample.fields["tokenizer.ggml.tokens"].contents())
    writer.add_vocab_size(size)
    return size


def write(path: pathlib.Path) -> None:
    """Writes the model and prints its path."""
    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    vocabulary = metadata(writer)

    def weight(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(f"{name}.weight", matrix(random, rows, columns), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))

    weight("token_embd", vocabulary, HIDDEN)
    norm("output_norm")
    for layer in (f"blk.{index}" for index in range(LAYERS)):
        norm(f"{layer}.attn_norm")
        norm(f"{layer}.ffn_norm")
        weight(f"{layer}.attn_q", HEADS * HEAD, HIDDEN)
        weight(f"{layer}.attn_k", KV_HEADS * HEAD, HIDDEN)
        weight(f"{layer}.attn_v", KV_HEADS * HEAD, HIDDEN)
        weight(f"{layer}.attn_output", HIDDEN, HEADS * HEAD)
        weight(f"{layer}.ffn_gate", FEED_FORWARD, HIDDEN)
        weight(f"{layer}.ffn_up", FEED_FORWARD, HIDDEN)
        weight(f"{layer}.ffn_down", HIDDEN, FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    if not PATH.exists():
        PATH.parent.mkdir(parents=True, exist_ok=True)
        partial = PATH.with_suffix(".partial")
        write(partial)
        partial.rename(PATH)
    print(PATH)


if __name__ == "__main__":
    main()
