"""The cases of bench_images.py: images, and requests about them in the form of chat messages."""

from __future__ import annotations

import base64
import dataclasses
import random
import struct
import zlib

import numpy as np

EDGE, OUTPUT_TOKENS, SINGLE_REQUESTS, CONCURRENT, TURNS = 512, 64, 3, 8, 5
SUBJECTS = ("car", "house", "tree", "river", "dog", "table", "bridge", "window")
PLACES = ("on the left", "on the right", "in the background", "in the foreground", "near the center", "at the top")
# The answers in the history of a conversation have this form and do not come from the engines, so that both engines
# compute the same prompts.
ANSWER = "There is a {} {}, and next to it a {} that is partly hidden. The light comes from above, and the {} is darker."


@dataclasses.dataclass(frozen=True)
class Case:
    """A case of the benchmark. The table has a row for each case."""

    name: str
    title: str
    # The target ratio of our figure to that of the peer: a minimum for tokens per second, a maximum for a time in seconds.
    wanted: float
    is_time: bool = False


CASES = (
    Case("c1", "1 at a time", 1.0),
    Case("c8", "8 concurrent", 1.5),
    Case("turns", "conversations of 5 turns: first token of the second turn", 0.3, is_time=True),
)


@dataclasses.dataclass(frozen=True)
class Message:
    """A message of a conversation. `image` is an index into the images of the scenario; only user messages can have an
    image."""

    role: str
    text: str
    image: int | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """A request of a scenario."""

    messages: tuple[Message, ...]
    # This request is sent when the request with this index has ended (None: at the start of the scenario).
    after: int | None = None
    # The turn of the conversation, from 0.
    turn: int = 0
    max_tokens: int = OUTPUT_TOKENS


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Images and the requests about them. The warm-up requests run first, all at once, and are not measured."""

    images: list[np.ndarray]
    warmup: list[Request]
    requests: list[Request]


def picture(seed: int) -> np.ndarray:
    """Returns an image with smooth areas, edges and some noise: `[EDGE, EDGE, 3]` bytes."""
    rng = np.random.default_rng(seed)
    across, down = np.meshgrid(np.linspace(0, 1, EDGE), np.linspace(0, 1, EDGE))
    pixels = np.zeros((EDGE, EDGE, 3))
    for _ in range(12):
        x, y, radius = rng.random(3)
        inside = (across - x) ** 2 + (down - y) ** 2 < (0.1 + radius / 4) ** 2
        pixels[inside] = rng.random(3) * 200
    pixels += np.stack([across, down, 1 - across], axis=-1) * 40 + rng.integers(0, 8, pixels.shape)
    return pixels.clip(0, 255).astype(np.uint8)


def scenario(case: Case, seed: int) -> Scenario:
    """Returns the scenario of a case. Another seed gives other images and texts."""
    rng = random.Random(f"{case.name} {seed}")
    images: list[np.ndarray] = []

    def question(image: bool) -> Message:
        text = f"What is {rng.choice(PLACES)} of the {rng.choice(SUBJECTS)}, and what is its color?"
        if image:
            images.append(picture(rng.randrange(1 << 32)))
        return Message("user", text, len(images) - 1 if image else None)

    def answer() -> Message:
        one, two, three = (rng.choice(SUBJECTS) for _ in range(3))
        return Message("assistant", ANSWER.format(one, rng.choice(PLACES), two, three))

    warmup = [Request((question(True),), max_tokens=8) for _ in range(2 if case.name == "c8" else 1)]
    if case.name == "turns":
        messages = [question(True)]
        requests = [Request(tuple(messages))]
        for turn in range(1, TURNS):
            messages += [answer(), question(False)]
            requests.append(Request(tuple(messages), after=turn - 1, turn=turn))
    elif case.name == "c8":
        requests = [Request((question(True),)) for _ in range(CONCURRENT)]
    else:
        afters = [None, *range(SINGLE_REQUESTS - 1)]
        requests = [Request((question(True),), after=after) for after in afters]
    return Scenario(images, warmup, requests)


def png(pixels: np.ndarray) -> bytes:
    """Encodes an image as PNG, so that both engines get the same pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    # Each row is stored as its difference from the row above (filter 2).
    above = np.vstack([np.zeros((1, width, 3), dtype=np.uint8), pixels[:-1]])
    rows = np.full((height, 1 + width * 3), 2, dtype=np.uint8)
    rows[:, 1:] = (pixels - above).reshape(height, -1)
    data = zlib.compress(rows.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def chat_messages(request: Request, urls: list[str]) -> list[dict]:
    """Returns the messages of a chat completion."""

    def content(message: Message) -> str | list[dict]:
        if message.image is None:
            return message.text
        image = {"type": "image_url", "image_url": {"url": urls[message.image]}}
        return [image, {"type": "text", "text": message.text}]

    return [{"role": message.role, "content": content(message)} for message in request.messages]


def data_url(pixels: np.ndarray) -> str:
    """Returns an image as a data: URL."""
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()
