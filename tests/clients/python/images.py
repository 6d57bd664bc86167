"""Sends images with the official Python client. Usage: images.py BASE_URL MODEL

The server's model must use 16 prompt tokens for an image, and its answers must depend on the images. Each scenario is a
function whose name describes the expected behavior. The run ends at the first failure.
"""

import base64
import struct
import sys

import openai
import scenarios
from png import png

IMAGE_TOKENS = 16


def part(url, **members):
    return {"type": "image_url", "image_url": {"url": url, **members}}


def text(content):
    return {"type": "text", "text": content}


def user(*parts):
    return {"role": "user", "content": list(parts)}


def chat(client, model, *messages, **parameters):
    return client.chat.completions.create(
        model=model, messages=messages, max_tokens=8, temperature=0, **parameters
    )


def answer(client, model, *messages):
    return chat(client, model, *messages).choices[0].message.content


def answers_depend_on_the_images(client, model):
    images = [png(value=20), png(value=220)]
    answers = [answer(client, model, user(part(image), text("What is this?"))) for image in images * 2]
    assert answers[:2] == answers[2:] and answers[0] != answers[1], answers
    order = [answer(client, model, user(part(a), part(b))) for a, b in [images, images[::-1]]]
    assert order[0] != order[1], order


def formats_have_the_same_pixels(client, model):
    # A gray square in each format. The files have exactly the same pixels, so the model receives the same image.
    rows = bytes([128]) * 8 * 8 * 3
    bitmap = struct.pack("<2sIIIIiiHHIIIIII", b"BM", 54 + len(rows), 0, 54, 40, 8, 8, 1, 24, 0, len(rows), 0, 0, 0, 0) + rows
    files = {
        "bmp": base64.b64encode(bitmap).decode(),
        "gif": "R0lGODdhCAAIAIEAAICAgAAAAAAAAAAAACwAAAAACAAIAAAIDwABCBxIsKDBgwgTKkwYEAA7",
        "webp": "UklGRh4AAABXRUJQVlA4TBEAAAAvB8ABAAdQwAIWsP+BiOh/AAA=",
        "jpeg": "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAMCAgMCAgMDAwMEAwMEBQgFBQQEBQoHBwYIDAoMDAsKCwsNDhIQDQ4RDgsLEBYQ"
        "ERMUFRUVDA8XGBYUGBIUFRT/wAALCAAIAAgBAREA/8QAFAABAAAAAAAAAAAAAAAAAAAAAP/EABQQAQAAAAAAAAAAAAAAAAAAAAD/"
        "2gAIAQEAAD8AP//Z",
    }
    expected = answer(client, model, user(part(png(value=128)), text("What is this?")))
    for kind, content in files.items():
        said = answer(client, model, user(part(f"data:image/{kind};base64,{content}"), text("What is this?")))
        assert said == expected, (kind, said, expected)


def streams_are_the_same_as_answers(client, model):
    message = user(text("a"), part(png(value=3), detail="low"), text("b"))
    whole = chat(client, model, message)
    chunks = list(chat(client, model, message, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content, (streamed, whole)
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens, chunks[-1]


def usage_counts_the_tokens_of_images(client, model):
    usage = [chat(client, model, user(text("a"), *[part(png())] * count)).usage for count in range(4)]
    difference = usage[1].prompt_tokens - usage[0].prompt_tokens
    assert difference >= IMAGE_TOKENS, usage
    counts = [use.prompt_tokens_details.image_tokens for use in usage]
    assert counts == [None, IMAGE_TOKENS, 2 * IMAGE_TOKENS, 3 * IMAGE_TOKENS], usage


def the_prefix_cache_includes_images(client, model):
    image = png()
    first = user(part(image), text("What is this, and where was it taken?"))
    said = answer(client, model, first)
    messages = [first, {"role": "assistant", "content": said}, user(text("Are you sure?"))]
    usage = chat(client, model, *messages).usage
    assert usage.prompt_tokens_details.cached_tokens > IMAGE_TOKENS, usage
    # A different image at the same position does not match the cached blocks of the first one.
    other = chat(client, model, user(part(png()), text("What is this, and where was it taken?"))).usage
    assert other.prompt_tokens_details.cached_tokens < IMAGE_TOKENS, other


def responses_have_images(client, model):
    image = {"type": "input_image", "image_url": png(value=5), "detail": "auto"}
    message = {"role": "user", "content": [image, {"type": "input_text", "text": "What is this?"}]}
    parameters = {"model": model, "max_output_tokens": 8, "temperature": 0}
    first = client.responses.create(input=[message], **parameters)
    assert first.usage.input_tokens > IMAGE_TOKENS, first
    assert first.usage.input_tokens_details.image_tokens == IMAGE_TOKENS, first
    said = answer(client, model, user(part(image["image_url"]), text("What is this?")))
    assert first.output_text == said, (first, said)
    events = list(client.responses.create(input=[message], stream=True, **parameters))
    assert events[-1].response.output_text == said, events[-1]
    [item] = client.responses.input_items.list(first.id).data
    assert item.content[0].type == "input_image" and item.content[0].image_url == image["image_url"], item
    # The prompt of the next turn includes the stored image.
    second = client.responses.create(input="Sure?", previous_response_id=first.id, **parameters)
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens, second
    assert second.usage.input_tokens_details.cached_tokens > IMAGE_TOKENS, second
    assert second.usage.input_tokens_details.image_tokens == IMAGE_TOKENS, second
    counted = client.responses.input_tokens.count(model=model, input=[message])
    assert counted.input_tokens == first.usage.input_tokens, counted


def errors_name_the_part(client, model):
    def refused(content, param, code="invalid_value", role="user"):
        try:
            chat(client, model, {"role": "system", "content": "x"}, {"role": role, "content": content})
        except openai.BadRequestError as error:
            assert (error.param, error.code) == (param, code), error
        else:
            raise AssertionError(f"{content} was accepted")

    image = "messages[1].content[0].image_url"
    refused([part("https://example.org/a.png")], image, "invalid_image_url")
    refused([part("http://169.254.169.254/latest")], image, "invalid_image_url")
    refused([part("/etc/passwd")], image, "invalid_image_url")
    refused([part("file:///etc/passwd")], image, "invalid_image_url")
    refused([part("data:image/png;base64,QUJD")], image)
    refused([part("data:image/png;base64,?")], image)
    refused([part(png()[:60])], image)
    refused([part(png(), detail="huge")], image + ".detail")
    refused([part(png(width=40_000, height=1))], image)
    refused([{"type": "image_url"}], image, "missing_required_parameter")
    refused([part(png())] * 33, "messages", "array_above_max_length")
    refused([part(png())], "messages[1].content[0].type", role="assistant")
    try:
        content = [{"type": "input_image", "file_id": "file-1"}]
        client.responses.create(model=model, input=[{"role": "user", "content": content}])
    except openai.BadRequestError as error:
        assert error.param == "input[0].content[0].file_id", error
    else:
        raise AssertionError("an unknown file was accepted")
    assert answer(client, model, user(text("Hello")))


SCENARIOS = [
    answers_depend_on_the_images,
    formats_have_the_same_pixels,
    streams_are_the_same_as_answers,
    usage_counts_the_tokens_of_images,
    the_prefix_cache_includes_images,
    responses_have_images,
    errors_name_the_part,
]

scenarios.run(SCENARIOS, *sys.argv[1:])
