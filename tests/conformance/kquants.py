"""Packs f32 values into GGUF's K-quant blocks of 256 weights, which the `gguf` package can only unpack.

Values are simply rounded to nearest, without a search for better scales. The blocks are valid
(`gguf.quants.dequantize` defines their values) but not as accurate as possible. `check()` verifies that packing and
unpacking changes random values by less than a limit that depends on the type.
"""

from __future__ import annotations

import gguf
import numpy as np

BLOCK = 256


def half(values: np.ndarray) -> np.ndarray:
    """Returns the values in f16, as bytes `[blocks, 2]`."""
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def rounded(values: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Returns values / steps, rounded, and 0 where the step is 0."""
    return np.round(np.divide(values, steps, out=np.zeros_like(values), where=steps != 0))


def scales_and_minima(x: np.ndarray, levels: int) -> tuple[np.ndarray, ...]:
    """Returns the packed header of each block, and the quantized weights, for the sub-blocks `x` `[blocks, 8, 32]`."""
    low = np.minimum(x.min(axis=2), 0)
    scale = (x.max(axis=2) - low) / levels
    d, dmin = (part.max(axis=1, keepdims=True) / 63 for part in (scale, -low))
    d, dmin = (part.astype("<f2").astype(np.float32) for part in (d, dmin))
    ls = np.clip(rounded(scale, np.broadcast_to(d, scale.shape)), 0, 63).astype(np.uint8)
    lm = np.clip(rounded(-low, np.broadcast_to(dmin, low.shape)), 0, 63).astype(np.uint8)
    steps = np.broadcast_to((d * ls)[:, :, None], x.shape)
    q = np.clip(rounded(x + (dmin * lm)[:, :, None], steps), 0, levels).astype(np.uint8)
    low_halves = (ls[:, 4:] & 15) | (lm[:, 4:] & 15) << 4
    scales, minima = ls[:, :4] | (ls[:, 4:] >> 4) << 6, lm[:, :4] | (lm[:, 4:] >> 4) << 6
    packed = np.concatenate([scales, minima, low_halves], axis=1)
    return np.concatenate([half(d), half(dmin), packed], axis=1), q


def q4_k(x: np.ndarray) -> np.ndarray:
    """Packs values into Q4_K blocks of 144 bytes."""
    head, q = scales_and_minima(x.reshape(-1, 8, 32), 15)
    return np.concatenate([head, (q[:, 0::2] | q[:, 1::2] << 4).reshape(-1, 128)], axis=1)


def q5_k(x: np.ndarray) -> np.ndarray:
    """Packs values into Q5_K blocks of 176 bytes."""
    head, q = scales_and_minima(x.reshape(-1, 8, 32), 31)
    high = np.zeros((len(q), 32), dtype=np.uint8)
    for sub in range(8):
        high |= (q[:, sub] >> 4) << sub
    q = q & 15
    return np.concatenate([head, high, (q[:, 0::2] | q[:, 1::2] << 4).reshape(-1, 128)], axis=1)


def q6_k(x: np.ndarray) -> np.ndarray:
    """Packs values into Q6_K blocks of 210 bytes."""
    x = x.reshape(-1, 16, 16)
    scale = np.abs(x).max(axis=2) / 31
    d = (scale.max(axis=1, keepdims=True) / 127).astype("<f2").astype(np.float32)
    scales = np.clip(rounded(scale, np.broadcast_to(d, scale.shape)), -128, 127)
    steps = np.broadcast_to((d * scales)[:, :, None], x.shape)
    q = (np.clip(rounded(x, steps), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.concatenate([q[:, :, 0] & 15 | (q[:, :, 2] & 15) << 4, q[:, :, 1] & 15 | (q[:, :, 3] & 15) << 4], axis=2)
    high = q[:, :, 0] >> 4 | (q[:, :, 1] >> 4) << 2 | (q[:, :, 2] >> 4) << 4 | (q[:, :, 3] >> 4) << 6
    scales = scales.astype(np.int8).view(np.uint8)
    return np.concatenate([low.reshape(-1, 128), high.reshape(-1, 64), scales, half(d)], axis=1)


PACKERS = {
    gguf.GGMLQuantizationType.Q4_K: q4_k,
    gguf.GGMLQuantizationType.Q5_K: q5_k,
    gguf.GGMLQuantizationType.Q6_K: q6_k,
}


def quantize(x: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Packs the rows of x into blocks of a type that this module or the `gguf` package can pack, and returns the bytes
    `[rows, bytes]`."""
    if kind not in PACKERS:
        return gguf.quants.quantize(x, kind)
    if x.shape[-1] % BLOCK:
        raise ValueError(f"rows of {x.shape[-1]} are not whole blocks of {BLOCK}")
    return PACKERS[kind](np.ascontiguousarray(x, dtype=np.float32)).reshape(x.shape[0], -1)


def check() -> None:
    """Checks that packing and unpacking changes random values by less than a limit that depends on the type."""
    x = np.random.default_rng(1).standard_normal((64, 512), dtype=np.float32)
    for kind, error_max in (("Q4_K", 0.25), ("Q5_K", 0.13), ("Q6_K", 0.08)):
        kind = gguf.GGMLQuantizationType[kind]
        packed = quantize(x, kind)
        error = float(np.abs(gguf.quants.dequantize(packed, kind) - x).max())
        assert error < error_max, f"{kind.name}: {error}"
