"""Creates images for the client tests."""

import base64
import random
import struct
import zlib


def png(width=8, height=8, value=None):
    """Returns the data URL of a PNG image in a single color, which is random by default."""
    color = random.randbytes(3) if value is None else bytes([value] * 3)
    chunk = lambda kind, content: (
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    )
    rows = (b"\0" + color * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(file).decode()
