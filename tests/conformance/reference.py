"""A straightforward implementation of the model in a GGUF file: weights are dequantized to f32 and multiplied with
numpy. Except for the package `gguf`, which reads and dequantizes the file, this module deliberately shares no code with
the engine, OpenVINO or llama.cpp.

The implementation covers llama, qwen2, qwen3, gemma3 and phi3. It raises `Unsupported` for a file with unused tensors,
an unsupported RoPE scaling, soft caps, or keys and values of different sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import gguf
import numpy as np

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "phi3")
# Dequantized matrices are cached up to this total size; beyond it, a matrix is dequantized for each use.
KEPT_BYTES_MAX = 6 << 30
# In Gemma 3, five layers with a sliding window alternate with one layer without a window. The RoPE of layers with a
# window has the base GEMMA3_LOCAL_BASE, unless the file sets another.
GEMMA3_PATTERN = 6
GEMMA3_LOCAL_BASE = 10_000.0


class Unsupported(Exception):
    """Raised if the file contains a feature that this reference does not support."""


@dataclass
class Shape:
    """The hyperparameters, from the file's metadata."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    eps: float
    rope_dims: int
    rope_base: float
    rope_base_local: float
    rope_scale: float
    rope_attention_factor: float
    window: int
    context: int
    original_context: int
    scaled: dict = field(default_factory=dict)


def metadata(reader: gguf.GGUFReader) -> dict:
    """Returns all key-value pairs of the file."""
    return {name: value.contents() for name, value in reader.fields.items() if not name.startswith("GGUF.")}


def shape_of(meta: dict) -> Shape:
    """Reads the hyper-parameters."""
    arch = meta["general.architecture"]
    if arch not in ARCHITECTURES:
        raise Unsupported(f"architecture {arch}")

    def get(key: str, default=None):
        value = meta.get(f"{arch}.{key}", default)
        if value is None:
            raise Unsupported(f"the file has no {arch}.{key}")
        return value

    heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
    head = int(get("attention.key_length", hidden // heads))
    if int(get("attention.value_length", head)) != head:
        raise Unsupported("keys and values of different sizes")
    scaling = get("rope.scaling.type", "none")
    if scaling not in ("none", "linear", "longrope"):
        raise Unsupported(f"rope scaling {scaling}")
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if meta.get(f"{arch}.{key}"):
            raise Unsupported(key)
    base = float(get("rope.freq_base", 10_000.0))
    context = int(get("context_length"))
    return Shape(
        architecture=arch,
        layers=int(get("block_count")),
        hidden=hidden,
        heads=heads,
        kv_heads=int(get("attention.head_count_kv", heads)),
        head=head,
        eps=float(get("attention.layer_norm_rms_epsilon")),
        rope_dims=int(get("rope.dimension_count", head)),
        rope_base=base,
        rope_base_local=float(get("rope.freq_base_swa", GEMMA3_LOCAL_BASE)) if arch == "gemma3" else base,
        rope_scale=1.0 / float(get("rope.scaling.factor", 1.0)) if scaling == "linear" else 1.0,
        rope_attention_factor=float(get("rope.scaling.attn_factor", 1.0)),
        window=int(get("attention.sliding_window", 0)),
        context=context,
        original_context=int(get("rope.scaling.original_context_length", context)),
    )


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Normalizes by the root mean square over the last axis, and multiplies by the weight."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight


def silu(x: np.ndarray) -> np.ndarray:
    """The SiLU function: x times the logistic function of x."""
    return x / (1.0 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """The tanh approximation of GELU, which Gemma uses."""
    return 0.5 * x * (1.0 + np.tanh(np.float32(math.sqrt(2.0 / math.pi)) * (x + np.float32(0.044715) * x**3)))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the log probabilities along the last axis, in f64."""
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


class Reference:
    """A reference implementation of the model in a GGUF file, in NumPy."""

    def __init__(self, path: str):
        reader = gguf.GGUFReader(path)
        self.meta = metadata(reader)
        self.shape = shape_of(self.meta)
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.kept: dict[str, np.ndarray] = {}
        self.kept_bytes = 0
        self.used: set[str] = set()

    def weight(self, name: str) -> np.ndarray:
        """Returns a tensor in f32, row-major, and caches it unless the cache would exceed its size limit."""
        self.used.add(name)
        if name in self.kept:
            return self.kept[name]
        tensor = self.tensors[name]
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        value = value.reshape(tuple(int(n) for n in reversed(tensor.shape)))
        if self.kept_bytes + value.nbytes <= KEPT_BYTES_MAX:
            self.kept[name] = value
            self.kept_bytes += value.nbytes
        return value

    def factor(self, values: np.ndarray) -> np.ndarray:
        """Returns numbers in the precision in which they are multiplied."""
        return values

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        """Returns x times the matrix `name`, plus its bias if the file has one."""
        out = self.factor(x) @ self.factor(self.weight(f"{name}.weight")).T
        if f"{name}.bias" in self.tensors:
            out = out + self.weight(f"{name}.bias")
        return out

    def rope_factors(self) -> np.ndarray | float:
        """Returns the divisors of the RoPE frequencies: Llama 3's table, Phi 3's short or long table, or 1. The long
        table applies if the model's context length exceeds its original context length."""
        if "rope_freqs.weight" in self.tensors:
            return self.weight("rope_freqs.weight")
        names = "rope_factors_short.weight", "rope_factors_long.weight"
        if names[0] in self.tensors:
            self.used.update(names)
            return self.weight(names[self.shape.context > self.shape.original_context])
        return 1.0

    def rotation(self, positions: np.ndarray, local: bool) -> tuple[np.ndarray, np.ndarray]:
        """Returns the cosines and sines, `[tokens, 1, dims / 2]`."""
        shape = self.shape
        base = shape.rope_base_local if local else shape.rope_base
        frequencies = base ** (-np.arange(0, shape.rope_dims, 2, dtype=np.float64) / shape.rope_dims)
        frequencies = frequencies / self.rope_factors() * (1.0 if local else shape.rope_scale)
        angles = positions[:, None, None] * frequencies
        factor = shape.rope_attention_factor
        return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)

    def rotate(self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        """Applies RoPE to `[tokens, heads, head]`. In llama files, whose weights are permuted accordingly, the elements
        of a pair are adjacent; in all others, they are in different halves of the head."""
        dims = self.shape.rope_dims
        out = x.copy()
        if self.shape.architecture == "llama":
            first, second = slice(0, dims, 2), slice(1, dims, 2)
        else:
            first, second = slice(0, dims // 2), slice(dims // 2, dims)
        a, b = x[..., first], x[..., second]
        out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
        return out

    def is_local(self, layer: int) -> bool:
        """Whether the layer has a sliding window."""
        if self.shape.window == 0:
            return False
        if self.shape.architecture == "gemma3":
            return layer % GEMMA3_PATTERN < GEMMA3_PATTERN - 1
        return self.shape.architecture == "phi3"

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, local: bool) -> np.ndarray:
        """Computes the causal attention within one sequence: `[tokens, heads, head]` to `[tokens, heads * head]`. With
        `local`, each token attends only to the tokens of its sliding window."""
        shape, tokens = self.shape, len(q)
        groups = shape.heads // shape.kv_heads
        q, k, v = self.factor(q), self.factor(k), self.factor(v)
        q = q.reshape(tokens, shape.kv_heads, groups, shape.head).transpose(1, 2, 0, 3)
        scores = q @ k.transpose(1, 2, 0)[:, None] / np.float32(math.sqrt(shape.head))
        distance = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
        hidden = distance < 0
        if local:
            hidden |= distance >= shape.window
        scores[:, :, hidden] = -np.inf
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        return (self.factor(scores) @ v.transpose(1, 0, 2)[:, None]).transpose(2, 0, 1, 3).reshape(tokens, -1)

    def attention(self, x: np.ndarray, layer: int, spans: list[slice]) -> np.ndarray:
        """Computes the attention of a layer within each sequence; the sequences are consecutive in `x`."""
        shape, name = self.shape, f"blk.{layer}"
        sizes = shape.heads * shape.head, shape.kv_heads * shape.head
        if f"{name}.attn_qkv.weight" in self.tensors:
            q, k, v = np.split(self.linear(x, f"{name}.attn_qkv"), [sizes[0], sizes[0] + sizes[1]], axis=-1)
        else:
            q, k, v = (self.linear(x, f"{name}.attn_{part}") for part in "qkv")
        q = q.reshape(len(x), shape.heads, shape.head)
        k, v = (part.reshape(len(x), shape.kv_heads, shape.head) for part in (k, v))
        if f"{name}.attn_q_norm.weight" in self.tensors:
            q = rms(q, self.weight(f"{name}.attn_q_norm.weight"), shape.eps)
            k = rms(k, self.weight(f"{name}.attn_k_norm.weight"), shape.eps)
        local = self.is_local(layer)
        positions = np.concatenate([np.arange(span.stop - span.start) for span in spans])
        cos, sin = self.rotation(positions, local and shape.architecture == "gemma3")
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        mixed = np.concatenate([self.attend(q[span], k[span], v[span], local) for span in spans])
        return self.linear(mixed, f"{name}.attn_output")

    def feed_forward(self, x: np.ndarray, layer: int) -> np.ndarray:
        """Computes the feed-forward network of a layer."""
        name = f"blk.{layer}"
        up = self.linear(x, f"{name}.ffn_up")
        if f"{name}.ffn_gate.weight" in self.tensors:
            gate = self.linear(x, f"{name}.ffn_gate")
        else:
            gate, up = np.split(up, 2, axis=-1)
        activation = gelu_tanh if self.shape.architecture == "gemma3" else silu
        return self.linear(activation(gate) * up, f"{name}.ffn_down")

    def hidden(self, sequences: list[list[int]]) -> tuple[np.ndarray, list[slice]]:
        """Returns the last hidden states of all sequences, concatenated, and the range of each sequence."""
        shape, eps = self.shape, self.shape.eps
        ends = np.cumsum([len(sequence) for sequence in sequences])
        spans = [slice(int(end) - len(sequence), int(end)) for end, sequence in zip(ends, sequences)]
        x = self.weight("token_embd.weight")[np.concatenate([np.asarray(sequence) for sequence in sequences])]
        sandwich = shape.architecture == "gemma3"
        if sandwich:
            x = x * np.float32(math.sqrt(shape.hidden))
        for layer in range(shape.layers):
            name = f"blk.{layer}"
            out = self.attention(rms(x, self.weight(f"{name}.attn_norm.weight"), eps), layer, spans)
            if sandwich:
                out = rms(out, self.weight(f"{name}.post_attention_norm.weight"), eps)
            x = x + out
            out = self.feed_forward(rms(x, self.weight(f"{name}.ffn_norm.weight"), eps), layer)
            if sandwich:
                out = rms(out, self.weight(f"{name}.post_ffw_norm.weight"), eps)
            x = x + out
        return rms(x, self.weight("output_norm.weight"), eps), spans

    def logits(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Returns the logits `[tokens, vocabulary]` of each sequence."""
        x, spans = self.hidden(sequences)
        head = "output" if "output.weight" in self.tensors else "token_embd"
        out = [self.linear(x[span], head) for span in spans]
        unused = self.tensors.keys() - self.used
        if unused:
            raise Unsupported(f"tensors {sorted(unused)[:4]}")
        return out

    def score(self, sequences: list[list[int]], together: int = 4) -> list[np.ndarray]:
        """Returns, for each sequence, the log probability of each token except the first, given the tokens before
        it."""
        scores = []
        for start in range(0, len(sequences), together):
            group = sequences[start : start + together]
            for sequence, logits in zip(group, self.logits(group)):
                rows = log_softmax(logits[:-1])
                scores.append(rows[np.arange(len(rows)), np.asarray(sequence[1:])])
        return scores


class Bf16Reference(Reference):
    """The model in plain bf16: both factors of each matrix product are rounded to bf16, and the products are summed in
    f32. All other values remain in f32, so real bf16 inference has more noise."""

    def factor(self, values: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        # Round to nearest, ties to even.
        return (bits + 0x7FFF + (bits >> 16 & 1) & np.uint32(0xFFFF0000)).view(np.float32)


def perplexity(scores: list) -> float:
    """Returns the exponential of the mean negative log probability."""
    return float(np.exp(-np.mean(np.concatenate([np.asarray(score) for score in scores]))))
