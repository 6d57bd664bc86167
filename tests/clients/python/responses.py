"""Tests the responses endpoint with the official Python client. Usage: responses.py BASE_URL MODEL scripted|real

`scripted`: the model returns the answers in `tests/tests/e2e_responses.rs`. In each turn, it first reasons. It then
calls one tool in the first turn and two tools in the second, and answers with text in the third.
`real`: a real model answers, so only a few checks depend on the text.
Each scenario is a function whose name describes the expected behavior. The run ends at the first failure.
"""

import json
import sys
import typing

import openai
import pydantic
import scenarios
from openai.types import responses as types
from pydantic import BaseModel

QUESTION = "Is it warmer in Paris or in London?"


class get_weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


class compare(BaseModel):
    """Which of two numbers is greater."""

    one: int
    other: int


class City(BaseModel):
    name: str
    country: str


TOOLS = [
    {
        "type": "function",
        "name": tool.__name__,
        "description": tool.__doc__,
        "strict": True,
        "parameters": {**tool.model_json_schema(), "additionalProperties": False},
    }
    for tool in (get_weather, compare)
]
PLAIN = [{"type": "function", "name": tool["name"], "parameters": None, "strict": False} for tool in TOOLS]
CALLS = [
    [("get_weather", {"city": "Paris", "days": 1})],
    [("get_weather", {"city": "London", "days": 1}), ("compare", {"one": 21, "other": -4})],
    [],
]


def calls(response):
    found = [item for item in response.output if item.type == "function_call"]
    return found, [(call.name, json.loads(call.arguments)) for call in found]


def outputs(response):
    return [
        {"type": "function_call_output", "call_id": call.call_id, "output": "21"} for call in calls(response)[0]
    ]


def a_loop_of_three_turns_by_the_servers_memory(client, model):
    response = client.responses.create(model=model, input=QUESTION, tools=PLAIN, temperature=0)
    reasoning = response.output[0]
    assert reasoning.type == "reasoning" and reasoning.summary[0].text == "Let me see.\n", response
    assert response.usage.output_tokens_details.reasoning_tokens > 0, response.usage
    ids = [response.id]
    for expected in CALLS:
        assert calls(response)[1] == expected, response
        if expected:
            response = client.responses.create(
                model=model, input=outputs(response), tools=PLAIN, previous_response_id=response.id, temperature=0
            )
            assert response.previous_response_id == ids[-1]
            ids.append(response.id)
    assert response.output_text == "Paris is warmer." and len(set(ids)) == 3, response
    given = list(client.responses.input_items.list(response.id, order="asc", limit=2))
    assert len(given) == 9 and given[0].content[0].text == QUESTION, given
    for id in ids:
        assert client.responses.retrieve(id).id == id
        client.responses.delete(id)
        expect_error(openai.NotFoundError, "response_not_found", lambda: client.responses.retrieve(id))
    expect_error(
        openai.NotFoundError,
        "previous_response_not_found",
        lambda: client.responses.create(model=model, input="x", previous_response_id=ids[-1]),
    )


def a_loop_of_three_turns_by_the_clients_memory(client, model):
    items = [{"role": "user", "content": QUESTION}]
    for expected in CALLS:
        response = client.responses.create(
            model=model,
            input=items,
            tools=PLAIN,
            temperature=0,
            store=False,
            include=["reasoning.encrypted_content"],
        )
        assert calls(response)[1] == expected, response
        items += [item.model_dump(exclude_none=True) for item in response.output] + outputs(response)
    assert response.output_text == "Paris is warmer." and response.store is False, response


def a_loop_of_three_streamed_turns_in_a_conversation(client, model):
    # Behind a router with several models, the request must name the model.
    conversation = client.conversations.create(metadata={"a": "b"}, extra_body={"model": model})
    given = QUESTION
    for expected in CALLS:
        with client.responses.stream(
            model=model, input=given, tools=TOOLS, temperature=0, conversation=conversation.id
        ) as stream:
            response = streamed(stream)
        found, arguments = calls(response)
        assert arguments == expected, response
        given = outputs(response)
    assert response.output_text == "Paris is warmer." and response.conversation.id == conversation.id, response
    items = list(client.conversations.items.list(conversation.id, order="asc", limit=3))
    first = ["message", "reasoning", "function_call", "function_call_output"]
    second = ["reasoning", "function_call", "function_call", "function_call_output", "function_call_output"]
    assert [item.type for item in items] == [*first, *second, "reasoning", "message"], items
    client.conversations.delete(conversation.id)
    expect_error(
        openai.NotFoundError, "conversation_not_found", lambda: client.conversations.retrieve(conversation.id)
    )


def streamed(stream):
    """Returns the response of a stream, and checks the properties of its events that the client does not check."""
    number, kinds, open_items = 0, [], {}
    for event in stream:
        assert event.sequence_number == number, event
        number += 1
        kinds.append(event.type)
        if event.type == "response.output_item.added":
            assert event.output_index == len(open_items), event
            open_items[event.output_index] = event.item.id
        elif hasattr(event, "item_id"):
            assert open_items[event.output_index] == event.item_id, event
        elif event.type == "response.output_item.done":
            assert open_items[event.output_index] == event.item.id, event
    assert kinds[:2] == ["response.created", "response.in_progress"], kinds
    response = stream.get_final_response() if kinds[-1] == "response.completed" else event.response
    assert [item.id for item in response.output] == list(open_items.values()), response
    assert len(set(open_items.values())) == len(open_items), open_items
    return response


def calls_are_parsed_into_models(client, model):
    tools = [openai.pydantic_function_tool(get_weather), openai.pydantic_function_tool(compare)]
    response = client.responses.parse(model=model, input=QUESTION, tools=tools, temperature=0)
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert call.parsed_arguments == get_weather(city="Paris", days=1), call


def a_response_in_the_background_is_polled_followed_and_cancelled(client, model):
    begun = client.responses.create(model=model, input="Count to a hundred.", background=True, max_output_tokens=40)
    assert begun.status in ("queued", "in_progress") and begun.background is True, begun
    while (now := client.responses.retrieve(begun.id)).status in ("queued", "in_progress"):
        pass
    assert now.status in ("completed", "incomplete") and now.usage.output_tokens > 0, now
    assert client.responses.cancel(begun.id).status == now.status, "a response that has ended does not change"

    stream = client.responses.create(
        model=model, input="Count to a hundred.", background=True, stream=True, max_output_tokens=40
    )
    events = list(stream)
    id = events[0].response.id
    assert events[1].type == "response.queued", events[1]
    again = list(client.responses.retrieve(id, stream=True))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in events]
    rest = list(client.responses.retrieve(id, stream=True, starting_after=3))
    assert [event.sequence_number for event in rest] == [event.sequence_number for event in events[4:]]
    with client.responses.stream(response_id=id, starting_after=3) as helped:
        assert [event.sequence_number for event in helped] == [event.sequence_number for event in events[4:]]

    whole = client.responses.create(model=model, input="Hi", max_output_tokens=4)
    expect_error(openai.BadRequestError, None, lambda: client.responses.cancel(whole.id))


def stored_responses_are_retrieved_in_every_way(client, model):
    logprobs = "message.output_text.logprobs"
    said = [{"role": "user", "content": word} for word in "abcde"]
    response = client.responses.create(
        model=model, input=said, include=[logprobs], max_output_tokens=8, extra_body={"ignore_eos": True}
    )
    kept = client.responses.retrieve(response.id, include=[logprobs])
    assert kept == response and len(kept.output[0].content[0].logprobs) == 8, kept
    listed = client.responses.input_items.list
    texts = lambda items: [item.content[0].text for item in items]
    assert texts(listed(response.id, order="asc", limit=2, include=[logprobs])) == list("abcde")
    newest = listed(response.id, limit=2)
    assert texts(newest.data) == ["e", "d"] and newest.has_more and newest.last_id == newest.data[1].id, newest
    assert texts(listed(response.id, limit=9, after=newest.last_id).data) == ["c", "b", "a"]
    assert client.responses.input_tokens.count(model=model, input=said).input_tokens == response.usage.input_tokens
    expect_error(
        openai.BadRequestError,
        "invalid_value",
        lambda: client.responses.retrieve(response.id, include=["everything"]),
    )
    expect_error(openai.BadRequestError, "invalid_value", lambda: listed(response.id, limit=101))
    client.responses.delete(response.id)
    expect_error(openai.NotFoundError, "response_not_found", lambda: listed(response.id))


def a_conversation_is_changed_item_by_item(client, model):
    said = lambda text: {"type": "message", "role": "user", "content": text}
    conversation = client.conversations.create(metadata={"a": "b"}, items=[said("a")], extra_body={"model": model})
    id = conversation.id
    assert client.conversations.update(id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert client.conversations.retrieve(id).metadata == {"c": "d"}
    items = client.conversations.items
    added = items.create(id, items=[said("b"), said("c")])
    first, second = added.data
    assert items.retrieve(first.id, conversation_id=id) == first and first.content[0].text == "b", first
    assert items.delete(first.id, conversation_id=id).id == id
    expect_error(openai.NotFoundError, "item_not_found", lambda: items.retrieve(first.id, conversation_id=id))
    # The input refers to an item by its ID. A conversation can contain an item only once.
    reference = [{"type": "item_reference", "id": second.id}]
    create = lambda **parameters: client.responses.create(model=model, max_output_tokens=4, **parameters)
    assert create(input=reference).usage.input_tokens > 0
    expect_error(openai.BadRequestError, "invalid_value", lambda: create(input=reference, conversation=id))
    response = create(input="d", conversation=id)
    assert response.conversation.id == id and response.usage.input_tokens > 0, response
    listed = list(items.list(id, order="asc", limit=2))
    texts = [item.content[0].text for item in listed if item.type == "message" and item.role == "user"]
    assert texts == ["a", "c", "d"] and len(listed) == 4, listed
    assert client.conversations.delete(id).deleted
    expect_error(openai.NotFoundError, "conversation_not_found", lambda: items.list(id))


def answers_and_events_are_of_the_clients_types(client, model):
    # The client does not validate responses by default. Strict validation against its types detects missing fields
    # and values of the wrong type.
    arguments = dict(model=model, input=QUESTION, tools=PLAIN, max_output_tokens=400)
    raw = client.responses.with_raw_response
    types.Response.model_validate_json(raw.create(**arguments).text, strict=True)
    lines = raw.create(stream=True, **arguments).http_response.read().decode().split("\n")
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    read = pydantic.TypeAdapter(types.ResponseStreamEvent)
    kinds = [read.validate_json(event, strict=True).type for event in events]
    assert kinds[-1] in ("response.completed", "response.incomplete") and len(kinds) > 8, kinds
    assert [line.removeprefix("event: ") for line in lines if line.startswith("event: ")] == kinds


def a_text_streams_as_it_is_answered_at_once(client, model):
    arguments = dict(model=model, input="Name three colours.", temperature=0, max_output_tokens=30, instructions="Be brief.")
    whole = client.responses.create(**arguments)
    assert whole.object == "response" and whole.model == model and whole.instructions == "Be brief.", whole
    assert whole.status == ("completed" if whole.incomplete_details is None else "incomplete"), whole
    with client.responses.stream(**arguments) as stream:
        response = streamed(stream)
    text = lambda response: response.output[-1].content[0].text
    assert text(response) == text(whole) and response.usage.output_tokens == whole.usage.output_tokens
    assert whole.output_text == text(whole)
    deltas = [event.delta for event in client.responses.create(**arguments, stream=True) if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text(whole) and len(deltas) > 1, deltas


def the_model_remembers_what_was_said_before(client, model):
    first = client.responses.create(model=model, input="What is the capital of France?", temperature=0)
    assert "Paris" in first.output_text, first.output_text
    second = client.responses.create(model=model, input="Say it again.", temperature=0, previous_response_id=first.id)
    again = client.responses.create(
        model=model,
        temperature=0,
        input=[
            {"role": "user", "content": "What is the capital of France?"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "Say it again."},
        ],
    )
    assert second.output_text == again.output_text and second.usage.input_tokens == again.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0, second.usage


def structured_output_is_parsed(client, model):
    arguments = dict(
        model=model, input="Describe Paris as JSON.", text_format=City, temperature=0, max_output_tokens=200
    )
    parsed = client.responses.parse(**arguments).output_parsed
    assert isinstance(parsed, City), parsed
    with client.responses.stream(**arguments) as stream:
        done = [event for event in stream if event.type == "response.output_text.done"]
        final = stream.get_final_response()
    assert isinstance(done[0].parsed, City) and final.output_parsed == done[0].parsed == parsed, final


def errors_are_typed(client, model):
    def create(**changed):
        return lambda: client.responses.create(**{"model": model, "input": "Hi", "max_output_tokens": 4} | changed)

    expect_error(openai.NotFoundError, "model_not_found", create(model="no-such-model"))
    for changed in [
        {"temperature": 9},
        {"input": []},
        {"max_output_tokens": 0},
        {"tools": [{"type": "namespace", "name": "n", "description": "No tools."}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
        {"truncation": "some"},
        {"stream": True, "top_logprobs": 99},
    ]:
        expect_error(openai.BadRequestError, None, create(**changed))
    for id in ["resp_1", "resp_" + 48 * "0"]:
        expect_error(openai.NotFoundError, "response_not_found", lambda: client.responses.retrieve(id))


def function_tool(name):
    return {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, "strict": False}


# The tool types that this version of the client defines: those that the server offers to the model, and those that it
# ignores. If a new version defines another type, add it here, and to `BUILT_IN` in `server/src/prepare/tools.rs` if it
# cannot be offered to the model.
OFFERED = {
    "function": function_tool("f"),
    "custom": {"type": "custom", "name": "c"},
    "namespace": {"type": "namespace", "name": "n", "description": "A group.", "tools": [function_tool("g")]},
}
IGNORED = {
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
}


def every_type_of_tool_that_the_client_knows_is_offered_or_ignored(client, model):
    kinds = {
        kind
        for tool in typing.get_args(openai.types.responses.ToolParam)
        for kind in typing.get_args(typing.get_type_hints(tool)["type"])
    }
    assert kinds == OFFERED.keys() | IGNORED, kinds ^ (OFFERED.keys() | IGNORED)
    tools = [OFFERED.get(kind, {"type": kind}) for kind in sorted(kinds)]
    response = client.responses.create(model=model, input="Hello", tools=tools, max_output_tokens=4)
    assert [tool.type for tool in response.tools] == sorted(OFFERED), response.tools
    warned = {(warning["code"], warning["param"]) for warning in response.model_extra["warnings"]}
    expected = {("unsupported_tool", f"tools[{at}]") for at, kind in enumerate(sorted(kinds)) if kind in IGNORED}
    assert warned == expected, warned ^ expected
    reasons = [warning["message"] for warning in response.model_extra["warnings"]]
    assert not any("does not know" in reason for reason in reasons), reasons


def expect_error(kind, code, call):
    try:
        call()
    except openai.APIStatusError as error:
        assert isinstance(error, kind), f"{type(error).__name__}, not {kind.__name__}: {error}"
        assert error.body and error.body["message"] and error.type == "invalid_request_error", error.body
        assert code is None or error.code == code, error.body
        return
    raise AssertionError(f"no {kind.__name__} was raised")


SCENARIOS = {
    "scripted": [
        a_loop_of_three_turns_by_the_servers_memory,
        a_loop_of_three_turns_by_the_clients_memory,
        a_loop_of_three_streamed_turns_in_a_conversation,
        calls_are_parsed_into_models,
        answers_and_events_are_of_the_clients_types,
        a_conversation_is_changed_item_by_item,
        a_response_in_the_background_is_polled_followed_and_cancelled,
        every_type_of_tool_that_the_client_knows_is_offered_or_ignored,
        errors_are_typed,
    ],
    "real": [
        a_text_streams_as_it_is_answered_at_once,
        the_model_remembers_what_was_said_before,
        structured_output_is_parsed,
        stored_responses_are_retrieved_in_every_way,
        answers_and_events_are_of_the_clients_types,
        a_response_in_the_background_is_polled_followed_and_cancelled,
        errors_are_typed,
    ],
}


url, model, kind = sys.argv[1:]
scenarios.run(SCENARIOS[kind], url, model)
