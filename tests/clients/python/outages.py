"""Sends requests with several instances of the official Python client until SIGTERM, while replicas behind a router are
killed and stopped. Usage: outages.py BASE_URL MODEL

No request may fail before the first byte of its answer, although the clients do not retry. A stream that has begun
must be complete or end with an error event, which the client raises as an exception.
"""

import asyncio
import signal
import sys

import openai

CLIENTS = 8


async def whole_or_broken(client, request):
    """Reads a stream, and returns how it ended."""
    stream = await client.chat.completions.create(**request, stream=True)
    chunks, finish = 0, None
    try:
        async for chunk in stream:
            chunks += 1
            finish = chunk.choices[0].finish_reason if chunk.choices else finish
    except openai.APIError as error:
        # For status errors and connection errors, the client raises subclasses of `APIError`, so check the exact type.
        assert type(error) is openai.APIError and error.code == "replica_failed", repr(error)
        assert chunks > 0, "an answer failed before its first byte"
        return "broken"
    assert finish in ("stop", "length"), finish
    return "whole"


async def ask(number, url, model, is_over, tally):
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0, timeout=300) as client:
        count = 0
        while not is_over.is_set():
            count += 1
            messages = [{"role": "user", "content": f"Official client {number} asks for the {count}th time."}]
            request = dict(model=model, messages=messages, temperature=0, max_tokens=6)
            if count % 3 == 0:
                answer = await client.chat.completions.create(**request)
                assert answer.choices[0].finish_reason in ("stop", "length"), answer
                tally["whole"] += 1
            else:
                tally[await whole_or_broken(client, request)] += 1


async def main():
    url, model = sys.argv[1:]
    is_over, tally = asyncio.Event(), {"whole": 0, "broken": 0}
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
    print("asking", flush=True)
    await asyncio.gather(*(ask(number, url, model, is_over, tally) for number in range(CLIENTS)))
    assert tally["whole"] >= CLIENTS, tally
    print(f"{tally}: all scenarios passed")


asyncio.run(main())
