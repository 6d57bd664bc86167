"""Image files in all supported formats and color types, and their pixels as Pillow decodes them."""

from __future__ import annotations

import io
import pathlib

import numpy as np
from PIL import Image, ImageOps

from pictures import draw

SIZE = (19, 13)


def flatten(image: Image.Image) -> Image.Image:
    """Returns the pixels that a viewer shows: upright, with 8 bits for each color, and on a white background."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or image.mode == "I":
        # Pillow's own conversion clips 16-bit gray to 255 instead of scaling it.
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, (255, 255, 255))
    return Image.alpha_composite(white, rgba).convert("RGB")


def with_alpha(picture: Image.Image) -> Image.Image:
    alpha = np.linspace(0, 255, SIZE[0] * SIZE[1]).astype(np.uint8).reshape(SIZE[1], SIZE[0])
    picture = picture.copy()
    picture.putalpha(Image.fromarray(alpha))
    return picture


def png16(mode: str) -> bytes:
    """Encodes a PNG file with 16 bits for each color. Pillow can write such files only in gray."""
    import struct
    import zlib

    colors = {"rgb": 3, "rgba": 4, "la": 2}[mode]
    kind = {"rgb": 2, "rgba": 6, "la": 4}[mode]
    width, height = SIZE
    numbers = (np.arange(width * height * colors, dtype=np.uint64) * 40503 % 65536).astype(">u2")
    rows = numbers.reshape(height, -1)
    data = b"".join(b"\0" + row.tobytes() for row in rows)

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def exif(orientation: int) -> Image.Exif:
    metadata = Image.Exif()
    metadata[0x0112] = orientation
    return metadata


def all_files() -> dict[str, bytes]:
    picture = draw(*SIZE)
    alpha = with_alpha(picture)
    gray = picture.convert("L")
    smooth = picture.resize((64, 48), Image.Resampling.BICUBIC)
    gray16 = Image.fromarray((np.asarray(gray).astype(np.uint16) * 257 ^ 0x35))
    palette = picture.quantize(16)
    transparent = palette.copy()
    transparent.info["transparency"] = 3
    frames = [draw(*SIZE).rotate(180 * index) for index in range(2)]
    values = {
        "rgb.png": encode(picture, "PNG"),
        "rgba.png": encode(alpha, "PNG"),
        "gray.png": encode(gray, "PNG"),
        "gray-alpha.png": encode(alpha.convert("LA"), "PNG"),
        "gray16.png": encode(gray16, "PNG"),
        "rgb16.png": png16("rgb"),
        "rgba16.png": png16("rgba"),
        "gray-alpha16.png": png16("la"),
        "bits1.png": encode(picture.convert("1"), "PNG"),
        "palette.png": encode(palette, "PNG"),
        "palette-transparent.png": encode(transparent, "PNG", transparency=3),
        "oriented.png": encode(picture, "PNG", exif=exif(6)),
        "baseline.jpg": encode(smooth, "JPEG", quality=95, subsampling=0),
        "subsampled.jpg": encode(smooth, "JPEG", quality=95, subsampling=2),
        "progressive.jpg": encode(smooth, "JPEG", quality=95, subsampling=0, progressive=True),
        "gray.jpg": encode(smooth.convert("L"), "JPEG", quality=95),
        "cmyk.jpg": encode(smooth.convert("CMYK"), "JPEG", quality=95),
        "lossless.webp": encode(picture, "WEBP", lossless=True),
        "lossless-alpha.webp": encode(alpha, "WEBP", lossless=True, exact=True),
        "lossy.webp": encode(smooth, "WEBP", quality=95),
        "oriented.webp": encode(picture, "WEBP", lossless=True, exif=exif(8)),
        "animated.webp": encode(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True),
        "palette.gif": encode(palette, "GIF"),
        "transparent.gif": encode(transparent, "GIF", transparency=3),
        "animated.gif": encode(palette, "GIF", save_all=True, append_images=[palette.rotate(180)], duration=100),
        "rgb.bmp": encode(picture, "BMP"),
        "palette.bmp": encode(palette, "BMP"),
        "gray.bmp": encode(gray, "BMP"),
    }
    for orientation in range(1, 9):
        values[f"orientation-{orientation}.jpg"] = encode(gray.resize((40, 24)), "JPEG", quality=95,
                                                          exif=exif(orientation))
    return values


def write_all(directory: pathlib.Path) -> dict[str, dict]:
    """Writes all files and returns their sizes and pixels."""
    directory.mkdir(parents=True, exist_ok=True)
    values = {}
    for name, content in all_files().items():
        (directory / name).write_bytes(content)
        with Image.open(io.BytesIO(content)) as image:
            pixels = np.asarray(flatten(image))
        values[name] = {"width": pixels.shape[1], "height": pixels.shape[0], "pixels": pixels.tobytes().hex()}
    return values
