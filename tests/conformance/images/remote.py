"""Implements the image processing of InternVL and MiniCPM-V 2.6, whose authors publish its code next to the models."""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image

IMAGENET_MEAN = [0.485, 0.456, 0.406]
IMAGENET_STD = [0.229, 0.224, 0.225]


def normalized(picture: Image.Image, mean: list[float], std: list[float]) -> np.ndarray:
    values = np.asarray(picture).astype(np.float32) / np.float32(255)
    values = (values - np.asarray(mean, dtype=np.float32)) / np.asarray(std, dtype=np.float32)
    return values.transpose(2, 0, 1)


def internvl(picture: Image.Image, size: int, tiles_max: int) -> np.ndarray:
    """Returns the tiles, followed by a thumbnail if there is more than one tile, as [tiles, 3, size, size]."""
    width, height = picture.size
    grids = [(i, j) for i in range(1, tiles_max + 1) for j in range(1, tiles_max + 1) if i * j <= tiles_max]
    best, best_difference = (1, 1), math.inf
    for grid in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        difference = abs(width / height - grid[0] / grid[1])
        if difference < best_difference:
            best, best_difference = grid, difference
        elif difference == best_difference and width * height > 0.5 * size * size * grid[0] * grid[1]:
            best = grid
    canvas = picture.resize((best[0] * size, best[1] * size), Image.Resampling.BICUBIC)
    tiles = [canvas.crop((x * size, y * size, (x + 1) * size, (y + 1) * size))
             for y in range(best[1]) for x in range(best[0])]
    if len(tiles) > 1:
        tiles.append(picture.resize((size, size), Image.Resampling.BICUBIC))
    return np.stack([normalized(tile, IMAGENET_MEAN, IMAGENET_STD) for tile in tiles])


def multiple(length: float, step: int) -> int:
    return max(round(length / step) * step, step)


def best_size(width: float, height: float, scale: int, grows: bool) -> tuple[int, int]:
    if width * height > scale * scale or grows:
        ratio = width / height
        height = int(scale / math.sqrt(ratio))
        width = int(height * ratio)
    return multiple(width, 14), multiple(height, 14)


def slice_grid(size: tuple[int, int], scale: int, slices_max: int) -> tuple[int, int] | None:
    """Returns the numbers of columns and rows of slices, or None if the image is not divided."""
    width, height = size
    count = min(math.ceil(width * height / (scale * scale)), slices_max)
    if count <= 1:
        return None
    counts = [n for n in (count - 1, count, count + 1) if n != 1 and n <= slices_max]
    grids = [(m, n // m) for n in counts for m in range(1, n + 1) if n % m == 0]
    return min(grids, key=lambda grid: abs(math.log(width / height) - math.log(grid[0] / grid[1])))


def minicpmv(picture: Image.Image, scale: int, slices_max: int) -> list[tuple[np.ndarray, tuple[int, int]]]:
    """Returns, for the overview and for each slice, the values [3, 14, 14 * patches] and the numbers of rows and
    columns of patches."""
    grid = slice_grid(picture.size, scale, slices_max)
    if grid is None:
        pictures = [picture.resize(best_size(*picture.size, scale, True), Image.Resampling.BICUBIC)]
    else:
        pictures = [picture.resize(best_size(*picture.size, scale, False), Image.Resampling.BICUBIC)]
        columns, rows = (multiple(side, count) / count for side, count in zip(picture.size, grid))
        width, height = best_size(columns, rows, scale, True)
        canvas = picture.resize((width * grid[0], height * grid[1]), Image.Resampling.BICUBIC)
        pictures += [canvas.crop((x * width, y * height, (x + 1) * width, (y + 1) * height))
                     for y in range(grid[1]) for x in range(grid[0])]
    values = []
    for part in pictures:
        pixels = torch.tensor(normalized(part, [0.5] * 3, [0.5] * 3))
        patches = torch.nn.functional.unfold(pixels[None], (14, 14), stride=(14, 14))
        patches = patches.reshape(3, 14, 14, -1).permute(0, 1, 3, 2).reshape(3, 14, -1)
        values.append((patches.numpy(), (part.height // 14, part.width // 14)))
    return values


def minicpmv_text(size: tuple[int, int], scale: int, slices_max: int, queries: int) -> str:
    """Returns the text that represents the first image in a prompt."""
    text = "<image_id>0</image_id><image>" + "<unk>" * queries + "</image>"
    grid = slice_grid(size, scale, slices_max)
    if grid is None:
        return text
    row = ("<slice>" + "<unk>" * queries + "</slice>") * grid[0]
    return text + "\n".join([row] * grid[1])


def position_ids(rows: int, columns: int, side: int) -> np.ndarray:
    """Returns, for each patch, the index of its position embedding in a grid of side * side embeddings."""
    boundaries = torch.arange(1 / side, 1.0, 1 / side)

    def buckets(count: int) -> torch.Tensor:
        fractions = torch.arange(0, 1 - 1e-6, 1 / torch.tensor(count))
        return torch.bucketize(fractions, boundaries, right=True)

    return (buckets(rows)[:, None] * side + buckets(columns)).flatten().numpy()


def pos_embed(hidden: int, rows: int, columns: int) -> np.ndarray:
    """Returns the sines and cosines of the column and then of the row of each patch, as [rows, columns, hidden]."""
    omega = np.arange(hidden // 4, dtype=np.float32) / np.float32(hidden / 4)
    omega = np.float32(1) / np.float32(10000) ** omega

    def waves(positions: np.ndarray) -> np.ndarray:
        angles = positions[..., None] * omega
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)

    x, y = np.meshgrid(np.arange(columns, dtype=np.float32), np.arange(rows, dtype=np.float32))
    return np.concatenate([waves(x), waves(y)], axis=-1)
