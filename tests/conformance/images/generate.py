#!/usr/bin/env python3
"""Writes the reference values for the tests of `server/images`, with Pillow and the processors of transformers.

Usage: generate.py DIRECTORY, with the packages in requirements.txt. DIRECTORY is `server/images/tests/reference`. With
the same versions of the packages, the script writes the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib

import numpy as np
from PIL import Image

import families
import files
from pictures import draw

FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC,
           "lanczos": Image.Resampling.LANCZOS}
# Width and height before and after resizing. The cases cover enlarging, shrinking, changing only one axis, single
# pixels, and extreme proportions.
RESIZES = [
    ((1, 1), (5, 3)), ((2, 1), (1, 7)), ((3, 200), (28, 476)), ((300, 200), (308, 196)), ((300, 200), (56, 56)),
    ((182, 126), (182, 60)), ((182, 126), (61, 126)), ((17, 31), (448, 448)), ((4000, 28), (448, 448)),
    ((4000, 28), (5376, 448)), ((801, 333), (336, 140)), ((640, 480), (364, 364)), ((5, 5), (4, 4)),
    ((1000, 3), (3, 1000)),
]


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def resizes() -> list[dict]:
    values = []
    for before, after in RESIZES:
        picture = draw(*before)
        for name, number in FILTERS.items():
            pixels = np.asarray(picture.resize(after, number))
            values.append({"from": before, "to": after, "filter": name, "sha256": sha256(pixels),
                           "first": pixels.reshape(-1)[:6].tolist()})
    return values


def write(path: pathlib.Path, value: object) -> None:
    """Writes JSON with one line for each value of the outermost object or list, and for each element of the list
    `images`."""
    def dump(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    if isinstance(value, list):
        text = "[\n" + ",\n".join(map(dump, value)) + "\n]"
    else:
        parts = []
        for key, part in value.items():
            is_list = key == "images"
            content = "[\n" + ",\n".join(map(dump, part)) + "\n]" if is_list else dump(part)
            parts.append(f"{dump(key)}: {content}")
        text = "{\n" + ",\n".join(parts) + "\n}"
    path.write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--parts", default="resize,files,families", help="the files to write")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    arguments.directory.mkdir(parents=True, exist_ok=True)
    if "resize" in parts:
        write(arguments.directory / "resize.json", resizes())
    if "files" in parts:
        write(arguments.directory / "files.json", files.write_all(arguments.directory / "files"))
    if "families" in parts:
        for name, value in families.references():
            write(arguments.directory / f"{name}.json", value)


if __name__ == "__main__":
    main()
