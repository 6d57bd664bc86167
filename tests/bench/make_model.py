#!/usr/bin/env python3
"""Writes a GGUF file of a model with random weights, and prints its path: `make_model.py 1b|8b|30b-a3b`.

Each model has the shape of a real one (30b-a3b with fewer layers) and the tokenizer of the sample model. The output of
such a model is meaningless, but takes as long to compute as that of a real model of the same size. Benchmarks use these
models so that optimizations are not tuned to the sample model alone. Tensors are written one at a time, so the largest
one determines how much memory this program needs.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

import engines
import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

CONTEXT = 8192


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a model, and the types of its tensors."""

    file: str
    architecture: str
    layers: int
    hidden: int
    # The inner size of the feed-forward network, or of an expert.
    feed_forward: int
    heads: int
    kv_heads: int
    head: int
    # The size of the vocabulary; None for the size of the sample model's vocabulary.
    vocabulary: int | None
    # Whether the tensors have the mix of types that llama.cpp calls Q4_K_M. Otherwise all matrices are Q4_0.
    is_q4_k_m: bool = True
    experts: int = 0
    experts_used: int = 0
    # Whether the output has its own weights instead of those of the embedding.
    has_output: bool = True

    @property
    def path(self) -> pathlib.Path:
        return engines.WORK / self.file

    def bits_of(self, layer: int) -> Type:
        """Returns the type of the value and down projections in this layer. In half of the layers, Q4_K_M stores them
        with more bits (Q6_K) than in the others."""
        more = layer < self.layers // 8 or layer >= 7 * self.layers // 8 or (layer - self.layers // 8) % 3 == 2
        return (Type.Q6_K if more else Type.Q4_K) if self.is_q4_k_m else Type.Q4_0

    @property
    def most(self) -> Type:
        """Returns the type of most tensors."""
        return Type.Q4_K if self.is_q4_k_m else Type.Q4_0


SHAPES = {
    # Llama 3.2 1B. Q4_0 has integer zero points, so the peer's conversion to IR does not change the model.
    "1b": Shape("random-1b.Q4_0.gguf", "llama", 16, 2048, 8192, 32, 8, 64, None, is_q4_k_m=False, has_output=False),
    # Llama 3.1 8B.
    "8b": Shape("random-8b.Q4_K_M.gguf", "llama", 32, 4096, 14336, 32, 8, 128, 128_256),
    # Qwen3 30B-A3B with 12 of its 48 layers, so that the file is about as large as that of the 8B model.
    "30b-a3b": Shape(
        "random-30b-a3b-12-layers.Q4_K_M.gguf",
        "qwen3moe", 12, 2048, 768, 32, 4, 128, 151_936, experts=128, experts_used=8,
    ),
}


class Blocks:
    """Generates random quantized matrices. The values of their products with a normalized vector have a standard
    deviation of about 1."""

    # The number of blocks for which random scales are drawn; the other blocks of a matrix repeat these scales.
    POOL = 1 << 16

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)

    def matrix(self, kind: Type, rows: int, columns: int) -> np.ndarray:
        """Returns the bytes of the rows of a matrix."""
        values, size = gguf.GGML_QUANT_SIZES[kind]
        count = rows * columns // values
        words = self.random.integers(0, 1 << 64, (count * size + 7) // 8, dtype=np.uint64)
        blocks = words.view(np.uint8)[: count * size].reshape(count, size)
        {Type.Q4_0: self.q4_0, Type.Q4_K: self.q4_k, Type.Q6_K: self.q6_k}[kind](blocks, columns**-0.5)
        return blocks.reshape(rows, -1)

    @staticmethod
    def half(value: float) -> np.ndarray:
        return np.frombuffer(np.float16(value).tobytes(), dtype=np.uint8)

    def repeated(self, pool: np.ndarray, count: int) -> np.ndarray:
        """Returns `count` consecutive rows of a pool, starting at a random position and wrapping around at the end."""
        return np.resize(np.roll(pool, int(self.random.integers(len(pool))), axis=0), (count, pool.shape[1]))

    def q4_0(self, blocks: np.ndarray, deviation: float) -> None:
        """Sets the scales. If q is uniform from -8 to 7, the values s q have a standard deviation of 4.6 s."""
        blocks[:, :2] = self.half(deviation / 4.6)

    def q4_k(self, blocks: np.ndarray, deviation: float) -> None:
        """Sets the scales and minima. If q is uniform from 0 to 15, and s and m from 32 to 63, the values s q - 7.5 m
        have a standard deviation of about 240."""
        blocks[:, :2], blocks[:, 2:4] = self.half(deviation / 238), self.half(7.5 * deviation / 238)
        # The scales and minima are packed in the format that `unpack_scales_and_minima` in server-gguf reads.
        s, m = self.random.integers(32, 64, (2, self.POOL, 8), dtype=np.uint8)
        first, others = np.s_[:, :4], np.s_[:, 4:]
        scales = [s[first] | s[others] >> 4 << 6, m[first] | m[others] >> 4 << 6, s[others] & 15 | m[others] << 4]
        blocks[:, 4:16] = self.repeated(np.concatenate(scales, axis=1), len(blocks))

    def q6_k(self, blocks: np.ndarray, deviation: float) -> None:
        """Sets the scales. If q is uniform from 0 to 63, and s from 32 to 127, the values s (q - 32) have a standard
        deviation of about 1,560."""
        blocks[:, 208:210] = self.half(deviation / 1560)
        blocks[:, 192:208] = self.repeated(self.random.integers(32, 128, (self.POOL, 16), dtype=np.uint8), len(blocks))


def write_metadata(writer: gguf.GGUFWriter, shape: Shape) -> int:
    """Writes the shape and the tokenizer, and returns the size of the vocabulary."""
    writer.add_name(shape.file.removesuffix(".gguf"))
    kind = gguf.LlamaFileType
    writer.add_file_type(kind.MOSTLY_Q4_K_M if shape.is_q4_k_m else kind.MOSTLY_Q4_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(shape.layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    if shape.experts:
        writer.add_key_length(shape.head)
        writer.add_value_length(shape.head)
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)
        writer.add_expert_feed_forward_length(shape.feed_forward)
    else:
        writer.add_rope_dimension_count(shape.head)
    return write_tokenizer(writer, shape)


def write_tokenizer(writer: gguf.GGUFWriter, shape: Shape) -> int:
    """Writes the tokenizer of the sample model with as many unused tokens as the vocabulary needs."""
    sample = gguf.GGUFReader(engines.SAMPLE)
    size = len(sample.fields["tokenizer.ggml.tokens"].contents())
    unused = range(size, shape.vocabulary or size)
    padding = {
        "tokenizer.ggml.tokens": [f"<|unused_{number}|>" for number in unused],
        "tokenizer.ggml.token_type": [int(gguf.TokenType.UNUSED)] * len(unused),
        "tokenizer.ggml.scores": [0.0] * len(unused),
    }
    for name, field in sample.fields.items():
        if not name.startswith("tokenizer."):
            continue
        value = field.contents()
        if isinstance(value, list):
            value = value + padding.get(name, [])
        writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    writer.add_vocab_size(size + len(unused))
    return size + len(unused)


def tensors(shape: Shape, vocabulary: int):
    """Yields the name, the type and the dimensions (the rows before the columns) of each tensor."""
    most, q, kv = shape.most, shape.heads * shape.head, shape.kv_heads * shape.head
    inner, hidden = shape.feed_forward, shape.hidden
    yield "token_embd", most, (vocabulary, hidden)
    yield "output_norm", Type.F32, (hidden,)
    if shape.has_output:
        yield "output", Type.Q6_K, (vocabulary, hidden)
    for layer in range(shape.layers):
        more = shape.bits_of(layer)
        block = {
            "attn_norm": (Type.F32, (hidden,)),
            "ffn_norm": (Type.F32, (hidden,)),
            "attn_q": (most, (q, hidden)),
            "attn_k": (most, (kv, hidden)),
            "attn_v": (more, (kv, hidden)),
            "attn_output": (most, (hidden, q)),
        }
        if shape.experts:
            block |= {
                "attn_q_norm": (Type.F32, (shape.head,)),
                "attn_k_norm": (Type.F32, (shape.head,)),
                "ffn_gate_inp": (Type.F32, (shape.experts, hidden)),
                "ffn_gate_exps": (most, (shape.experts, inner, hidden)),
                "ffn_up_exps": (most, (shape.experts, inner, hidden)),
                "ffn_down_exps": (more, (shape.experts, hidden, inner)),
            }
        else:
            block |= {
                "ffn_gate": (most, (inner, hidden)),
                "ffn_up": (most, (inner, hidden)),
                "ffn_down": (more, (hidden, inner)),
            }
        for name, (kind, dimensions) in block.items():
            yield f"blk.{layer}.{name}", kind, dimensions


def content(blocks: Blocks, kind: Type, dimensions: tuple[int, ...]) -> np.ndarray:
    """Returns the data of a tensor."""
    if len(dimensions) == 1:
        return np.ones(dimensions, dtype=np.float32)
    *outer, columns = dimensions
    rows = int(np.prod(outer))
    if kind == Type.F32:
        return (blocks.random.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)
    return blocks.matrix(kind, rows, columns)


def write(path: pathlib.Path, shape: Shape) -> None:
    """Writes the model."""
    blocks = Blocks(seed=1)
    writer = gguf.GGUFWriter(path, shape.architecture)
    described = list(tensors(shape, write_metadata(writer, shape)))
    for name, kind, dimensions in described:
        values, size = gguf.GGML_QUANT_SIZES[kind]
        count = int(np.prod(dimensions))
        writer.add_tensor_info(f"{name}.weight", dimensions, np.dtype(np.float32), count // values * size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, kind, dimensions in described:
        writer.write_tensor_data(content(blocks, kind, dimensions))
    writer.close()


def make(shape: Shape) -> pathlib.Path:
    """Writes the model unless its file exists, and returns the path of the file."""
    path = shape.path
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        write(partial, shape)
        partial.rename(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    print(make(SHAPES[parser.parse_args().shape]))


if __name__ == "__main__":
    main()
