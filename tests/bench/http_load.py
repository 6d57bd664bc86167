"""A lightweight HTTP client for streamed completions, with one connection per request and minimal parsing.

Reading an event takes a few microseconds, so on a machine with two cores, the client uses only about one percent of the
processor time. `python http_load.py` measures only the client, with a minimal server.
"""

from __future__ import annotations

import asyncio
import json
import time

# The number of bytes that are retained from the end of a stream. They include the last chunks, which contain the usage.
TAIL_BYTES = 4096
END = b"data: [DONE]"


class Stream(asyncio.Protocol):
    """A request and its response."""

    def __init__(self, message: bytes, done: asyncio.Future):
        self.message, self.done = message, done
        self.events, self.first, self.last, self.tail = 0, None, None, b""

    def connection_made(self, transport) -> None:
        self.transport = transport
        self.sent = time.perf_counter()
        transport.write(self.message)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        events = data.count(b"data: ")
        if events:
            self.first, self.last = self.first or now, now
            self.events += events
        # The marker may span two reads.
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        if END in self.tail[-len(data) - len(END) :]:
            self.finish(None)

    def finish(self, error: str | None) -> None:
        """Sets the result unless it is already set, and closes the connection."""
        if not self.done.done():
            self.done.set_result(error)
        self.transport.close()

    def connection_lost(self, _exception) -> None:
        self.finish(self.tail.decode(errors="replace")[-500:] or "the server closed the connection")

    def completion_tokens(self) -> int:
        """Returns the number of generated tokens according to the usage in the last chunk."""
        at = self.tail.rfind(b'"completion_tokens":')
        digits = self.tail[at + 20 : at + 40].strip().split(b",")[0].split(b"}")[0]
        return int(digits) if at >= 0 else 0


def message(port: int, model: str, request: dict) -> bytes:
    """Encodes a request of a scenario as an HTTP message. The field `more` of the request (optional) contains
    additional parameters."""
    body = json.dumps({
        "model": model,
        "prompt": request["prompt"],
        "max_tokens": request["max_tokens"],
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **request.get("more", {}),
    }).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def send(port: int, message: bytes) -> Stream:
    """Sends one request and reads the whole response."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    _, stream = await loop.create_connection(lambda: Stream(message, done), "127.0.0.1", port)
    error = await done
    if error is not None:
        raise RuntimeError(f"a request failed: {error}")
    return stream


async def load(port: int, model: str, requests: list[dict]) -> dict:
    """Sends all requests at once or, if any of them has an `arrival`, one after another."""
    messages = [message(port, model, request) for request in requests]
    start = time.perf_counter()
    if any(request.get("arrival") for request in requests):
        streams = [await send(port, one) for one in messages]
    else:
        streams = await asyncio.gather(*(send(port, one) for one in messages))
    seconds = max(stream.last for stream in streams) - start
    waits = sorted(stream.first - stream.sent for stream in streams)
    return {
        "seconds": seconds,
        "output_tokens": sum(stream.completion_tokens() for stream in streams),
        "events": sum(stream.events for stream in streams),
        "first_token_p50": waits[len(waits) // 2],
    }


async def measure_itself(streams: int = 64, events: int = 500) -> float:
    """Returns the events per second that the client reads while the sender runs in the same thread."""
    event = b'data: {"id":"cmpl-0123456789","object":"text_completion","choices":[{"index":0,"text":" word"}]}\n\n'

    async def serve(reader, writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(events):
            writer.write(event)
            # Let the client run, so that it reads each event separately, as with a real server.
            await asyncio.sleep(0)
        writer.write(END + b"\n\n")
        await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    result = await load(port, "none", [{"prompt": [1], "max_tokens": 1}] * streams)
    server.close()
    return result["events"] / result["seconds"]


if __name__ == "__main__":
    print(f"{asyncio.run(measure_itself()):.0f} events/s")
