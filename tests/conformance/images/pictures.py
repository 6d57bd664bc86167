"""Pictures for the reference values. A picture depends only on its size, so the Rust tests can draw the same one."""

from __future__ import annotations

import numpy as np
from PIL import Image


def draw(width: int, height: int) -> Image.Image:
    """Draws gradients with noise, so that every pixel and every rounding matters."""
    y, x, color = np.meshgrid(
        np.arange(height, dtype=np.uint64), np.arange(width, dtype=np.uint64), np.arange(3, dtype=np.uint64),
        indexing="ij",
    )
    mask = np.uint64(0xFFFFFFFF)
    mixed = ((x * np.uint64(73856093)) ^ (y * np.uint64(19349663)) ^ (color * np.uint64(83492791))) & mask
    mixed = ((mixed ^ (mixed >> np.uint64(13))) * np.uint64(0x5BD1E995)) & mask
    noise = (mixed >> np.uint64(24)) & np.uint64(63)
    across = x * np.uint64(191) // np.uint64(max(width - 1, 1))
    down = y * np.uint64(191) // np.uint64(max(height - 1, 1))
    smooth = np.where(color == 0, across, np.where(color == 1, down, (x + y) * np.uint64(3) % np.uint64(192)))
    return Image.fromarray((smooth + noise).astype(np.uint8))
