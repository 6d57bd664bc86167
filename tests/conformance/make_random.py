#!/usr/bin/env python3
"""Writes small GGUF files with random weights for every tested architecture and tensor type.

The files are complete: they have the metadata and tensor names that llama.cpp's converter writes, and a byte-level BPE
tokenizer trained on corpus.txt. A file always has the same bytes, because its seed is derived from its name. Weights
are scaled so that attention is far from uniform and the logits have a standard deviation of about two. Every part of
the model therefore affects the result.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import re
import zlib

import gguf
import numpy as np

import kquants

HERE = pathlib.Path(__file__).parent
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16")
# Like a real "Q4_K_M" file: mostly Q4_K, with Q6_K for the most sensitive tensors.
MIXED = "Q4_K_M"
VOCABULARY = 512
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HIDDEN, FEED_FORWARD, CONTEXT = 256, 512, 2048
# For each architecture: the numbers of layers, heads and KV heads, the head size, whether the output matrix is the
# embedding matrix, and the pre-tokenizer.
SHAPES = {
    "llama": (3, 4, 2, 64, False, "smollm"),
    "qwen2": (3, 4, 2, 64, True, "qwen2"),
    "qwen3": (3, 4, 2, 128, True, "qwen2"),
    "gemma3": (6, 2, 1, 256, True, "gpt-2"),
    "phi3": (3, 4, 4, 64, False, "gpt-2"),
}
# Every architecture has files with at least two tensor types, and llama has a file for each type. Further files cover
# features of real files, such as rotary factors.
PLAN = (
    [("llama", kind, "") for kind in (*TYPES, MIXED)]
    + [(arch, kind, "") for arch in SHAPES if arch != "llama" for kind in ("Q4_1", "Q4_K")]
    + [("llama", "Q8_0", "rope-freqs"), ("llama", "F16", "rope-linear"), ("gemma3", "Q8_0", "rope-linear"),
       ("phi3", "F16", "longrope"), ("phi3", "F16", "longrope-long"), ("phi3", "F16", "window"), ("qwen2", "F16", ""),
       ("qwen3", "BF16", "")]
)


def byte_letters() -> dict[int, str]:
    """Returns GPT-2's mapping of every byte to a printable character."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    others = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + index) for index, byte in enumerate(others)}


def tokenizer() -> tuple[list[str], list[str]]:
    """Returns the tokens and merges of a byte-level BPE tokenizer with VOCABULARY tokens, special tokens first."""
    letters = byte_letters()
    text = (HERE / "corpus.txt").read_text()
    words = collections.Counter(
        tuple(letters[byte] for byte in word.encode()) for word in re.findall(r" ?\w+| ?[^\w\s]+|\s+", text)
    )
    tokens, merges = [*SPECIALS, *(letters[byte] for byte in range(256))], []
    while len(tokens) < VOCABULARY:
        pairs = collections.Counter()
        for word, count in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(" ".join(best))
        tokens.append("".join(best))
        words = collections.Counter({merged(word, best): count for word, count in words.items()})
    return tokens, merges


def merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """Returns the word with each occurrence of the pair merged."""
    out, at = [], 0
    while at < len(word):
        step = 2 if word[at : at + 2] == pair else 1
        out.append("".join(word[at : at + step]))
        at += step
    return tuple(out)


class File:
    """A file that is being written."""

    def __init__(self, path: pathlib.Path, arch: str, kind: str, variant: str):
        self.arch, self.kind, self.variant = arch, kind, variant
        self.layers, self.heads, self.kv_heads, self.head, self.tied, self.pre = SHAPES[arch]
        self.writer = gguf.GGUFWriter(path, arch)
        self.random = np.random.default_rng(zlib.crc32(f"{arch} {kind} {variant}".encode()))

    def matrix(self, name: str, rows: int, columns: int, spread: float = 1.0) -> None:
        """Writes a matrix whose product with a normalized vector has the standard deviation `spread`."""
        kind = self.kind
        if kind == MIXED:
            kind = "Q6_K" if re.search(r"ffn_down|attn_v|output\.|token_embd", name) else "Q4_K"
        kind = gguf.GGMLQuantizationType[kind]
        values = self.random.standard_normal((rows, columns), dtype=np.float32) * np.float32(spread / columns**0.5)
        self.writer.add_tensor(f"{name}.weight", kquants.quantize(values, kind), raw_dtype=kind)

    def vector(self, name: str, size: int, mean: float = 1.0, spread: float = 0.2) -> None:
        """Writes a vector in f32, the type that norm weights, biases and frequency factors always have."""
        values = self.random.standard_normal(size, dtype=np.float32) * np.float32(spread) + np.float32(mean)
        self.writer.add_tensor(name, values)

    def hyper_parameters(self) -> None:
        """Writes the metadata that llama.cpp's converter writes for the architecture."""
        writer = self.writer
        writer.add_name(f"random {self.arch} {self.kind} {self.variant}".strip())
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if self.kind == "F16" else gguf.LlamaFileType.GUESSED)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_block_count(self.layers)
        writer.add_context_length(CONTEXT)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(FEED_FORWARD)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(1_000_000.0 if self.arch == "gemma3" else 10_000.0)
        writer.add_vocab_size(VOCABULARY)
        if self.arch in ("qwen3", "gemma3"):
            writer.add_key_length(self.head)
            writer.add_value_length(self.head)
        else:
            writer.add_rope_dimension_count(self.head)
        if self.arch == "gemma3":
            writer.add_sliding_window(64)
        if self.arch == "phi3":
            # The window is longer than any tested sequence, except in the variant `window`
            # (docs/reference/conformance.md).
            writer.add_sliding_window(48 if self.variant == "window" else CONTEXT)
            writer.add_rope_scaling_orig_ctx_len(CONTEXT // 2 if self.variant == "longrope-long" else CONTEXT)
        self.rope_variant()

    def rope_variant(self) -> None:
        """Writes the metadata and the tensors of scaled rotary embeddings."""
        writer, pairs = self.writer, self.head // 2
        if self.variant == "rope-linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(4.0)
        if self.variant == "rope-freqs":
            factors = np.concatenate([np.ones(pairs // 2), np.linspace(1, 8, pairs - pairs // 2)])
            writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
        if self.variant in ("longrope", "longrope-long"):
            writer.add_rope_scaling_attn_factors(1.19)
            for name, top in (("short", 1.5), ("long", 30.0)):
                writer.add_tensor(f"rope_factors_{name}.weight", np.linspace(1, top, pairs).astype(np.float32))

    def vocabulary(self, tokens: list[str], merges: list[str]) -> None:
        """Writes the tokenizer."""
        writer = self.writer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(tokens)
        control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
        writer.add_token_types([control] * len(SPECIALS) + [normal] * (len(tokens) - len(SPECIALS)))
        writer.add_token_merges(merges)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(0)
        writer.add_add_bos_token(False)
        writer.add_chat_template(CHATML)

    def layer(self, index: int) -> None:
        """Writes the tensors of one layer."""
        name, arch = f"blk.{index}", self.arch
        q, kv = self.heads * self.head, self.kv_heads * self.head
        self.vector(f"{name}.attn_norm.weight", HIDDEN)
        if arch == "phi3":
            self.matrix(f"{name}.attn_qkv", q + 2 * kv, HIDDEN, 1.3)
        else:
            for part, rows, spread in (("q", q, 1.3), ("k", kv, 1.3), ("v", kv, 1.0)):
                self.matrix(f"{name}.attn_{part}", rows, HIDDEN, spread)
                if arch == "qwen2":
                    self.vector(f"{name}.attn_{part}.bias", rows, 0.0)
        if arch in ("qwen3", "gemma3"):
            self.vector(f"{name}.attn_q_norm.weight", self.head, 1.3)
            self.vector(f"{name}.attn_k_norm.weight", self.head, 1.3)
        self.matrix(f"{name}.attn_output", HIDDEN, q)
        if arch == "gemma3":
            self.vector(f"{name}.post_attention_norm.weight", HIDDEN)
        self.vector(f"{name}.ffn_norm.weight", HIDDEN)
        if arch == "phi3":
            self.matrix(f"{name}.ffn_up", 2 * FEED_FORWARD, HIDDEN)
        else:
            self.matrix(f"{name}.ffn_gate", FEED_FORWARD, HIDDEN)
            self.matrix(f"{name}.ffn_up", FEED_FORWARD, HIDDEN)
        self.matrix(f"{name}.ffn_down", HIDDEN, FEED_FORWARD, 2.0)
        if arch == "gemma3":
            self.vector(f"{name}.post_ffw_norm.weight", HIDDEN)

    def write(self, tokens: list[str], merges: list[str]) -> None:
        """Writes the whole file, with the tensors in the order of real files."""
        self.hyper_parameters()
        self.vocabulary(tokens, merges)
        # The spread of tied embeddings is also that of the logits, so it must be small. The hidden states of Gemma are
        # large nevertheless, because Gemma multiplies its embeddings by the square root of the hidden size.
        self.matrix("token_embd", VOCABULARY, HIDDEN, 2.0 if self.tied else 16.0)
        for index in range(self.layers):
            self.layer(index)
        self.vector("output_norm.weight", HIDDEN)
        if not self.tied:
            self.matrix("output", VOCABULARY, HIDDEN, 2.0)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def name_of(arch: str, kind: str, variant: str) -> str:
    """Returns the name of the file."""
    return "-".join(part for part in (arch, kind, variant) if part) + ".gguf"


def edition() -> str:
    """Returns a checksum of the sources that determine the content of the files, so that old files are not reused."""
    sources = (HERE / name for name in ("make_random.py", "kquants.py", "corpus.txt"))
    return f"{zlib.crc32(b''.join(source.read_bytes() for source in sources)):08x}"


def make(directory: pathlib.Path, plan: list[tuple[str, str, str]] = PLAN) -> list[pathlib.Path]:
    """Writes the files of the plan that do not exist yet, and returns the paths of all files of the plan."""
    directory.mkdir(parents=True, exist_ok=True)
    tokens, merges = tokenizer()
    paths = []
    for arch, kind, variant in plan:
        path = directory / name_of(arch, kind, variant)
        paths.append(path)
        if not path.exists():
            partial = path.with_suffix(".partial")
            File(partial, arch, kind, variant).write(tokens, merges)
            partial.rename(path)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--all", action="store_true", help="every architecture with every type")
    args = parser.parse_args()
    plan = [(arch, kind, "") for arch in SHAPES for kind in TYPES] if args.all else []
    for path in make(args.directory, [*PLAN, *(entry for entry in plan if entry not in PLAN)]):
        print(path)


if __name__ == "__main__":
    main()
