"""Sends images to the chat completions and responses endpoints with LangChain.

Usage: langchain_images.py BASE_URL MODEL

The server's model must use 16 prompt tokens for an image, and its answers must depend on the images. Each scenario is a
function whose name describes the expected behavior. The run ends at the first failure.
"""

import sys

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from png import png

IMAGE_TOKENS = 16
QUESTION = {"type": "text", "text": "What is this?"}


def model_of(base_url, model, **parameters):
    return ChatOpenAI(
        model=model,
        base_url=base_url,
        api_key="unused",
        max_retries=0,
        timeout=120,
        temperature=0,
        max_tokens=8,
        stream_usage=True,
        **parameters,
    )


def forms(url):
    """Returns an image in the formats that LangChain's documentation shows: two of LangChain, and one of OpenAI."""
    base64_content = url.partition(",")[2]
    return [
        {"type": "image", "base64": base64_content, "mime_type": "image/png"},
        {"type": "image", "source_type": "base64", "data": base64_content, "mime_type": "image/png"},
        {"type": "image_url", "image_url": {"url": url, "detail": "auto"}},
    ]


def answers_depend_on_the_images(chat):
    answers = []
    for value in (20, 220):
        said = {chat.invoke([HumanMessage([form, QUESTION])]).text for form in forms(png(value=value))}
        assert len(said) == 1, said
        answers += said
    assert answers[0] and answers[0] != answers[1], answers
    two = [png(value=20), png(value=220)]
    order = [chat.invoke([HumanMessage([forms(url)[0] for url in urls])]).text for urls in (two, two[::-1])]
    assert order[0] != order[1], order


def usage_counts_the_tokens_of_images(chat):
    usages = [chat.invoke([HumanMessage([QUESTION, *forms(png())[:1] * count])]).usage_metadata for count in range(3)]
    counts = [usage["input_tokens"] for usage in usages]
    # Each image adds the same number of tokens: its own, and those of the text around it.
    assert counts[1] - counts[0] >= IMAGE_TOKENS and counts[2] - counts[1] == counts[1] - counts[0], usages


def streams_are_the_same_as_answers(chat):
    messages = [SystemMessage("Be brief."), HumanMessage([forms(png(value=3))[0], QUESTION])]
    whole = chat.invoke(messages)
    chunks = list(chat.stream(messages))
    assert len(chunks) > 2, chunks
    streamed = sum(chunks[1:], chunks[0])
    assert streamed.text == whole.text, (streamed, whole)
    assert streamed.usage_metadata["input_tokens"] == whole.usage_metadata["input_tokens"], (streamed, whole)


def the_next_turn_reads_the_image_from_the_cache(chat):
    first = HumanMessage([forms(png())[0], {"type": "text", "text": "What is this, and where was it taken?"}])
    said = chat.invoke([first])
    assert isinstance(said, AIMessage)
    usage = chat.invoke([first, said, HumanMessage("Are you sure?")]).usage_metadata
    assert usage["input_token_details"]["cache_read"] > IMAGE_TOKENS, usage


def errors_name_the_part(chat):
    for image in ({"type": "image", "url": "http://127.0.0.1/a.png"}, *forms("data:image/png;base64,QUJD")):
        try:
            chat.invoke([HumanMessage([QUESTION, image])])
        except openai.BadRequestError as error:
            assert "content[1].image_url" in error.param, error
        else:
            raise AssertionError(f"{image} was accepted")


def chat_completions_report_the_tokens_of_images(chat):
    metadata = chat.invoke([HumanMessage([QUESTION, *forms(png())[:1] * 2])]).response_metadata
    assert metadata["token_usage"]["prompt_tokens_details"]["image_tokens"] == 2 * IMAGE_TOKENS, metadata


def stored_responses_have_their_images(chat):
    first = chat.invoke([HumanMessage([forms(png())[0], QUESTION])])
    next_turn = [HumanMessage("Are you sure?")]
    usage = chat.invoke(next_turn, previous_response_id=first.response_metadata["id"]).usage_metadata
    assert usage["input_token_details"]["cache_read"] > IMAGE_TOKENS, usage


def main():
    base_url, model = sys.argv[1:3]
    shared = [
        answers_depend_on_the_images,
        usage_counts_the_tokens_of_images,
        streams_are_the_same_as_answers,
        the_next_turn_reads_the_image_from_the_cache,
        errors_name_the_part,
    ]
    endpoints = {
        "chat completions": ({"use_responses_api": False}, chat_completions_report_the_tokens_of_images),
        "responses": ({"use_responses_api": True, "output_version": "responses/v1"}, stored_responses_have_their_images),
    }
    for endpoint, (parameters, own) in endpoints.items():
        chat = model_of(base_url, model, **parameters)
        for scenario in [*shared, own]:
            scenario(chat)
            print(f"{endpoint}, {scenario.__name__}: passed")
    print(f"{len(endpoints) * (len(shared) + 1)} scenarios passed")


main()
