"""Tests tool calls with the official Python client. Usage: tools.py BASE_URL MODEL scripted|required

`scripted`: the model returns the answers in `tests/tests/e2e_tools.rs`. It calls one tool in the first turn and two
tools in the second, and answers with text in the third.
`required`: a tool call is enforced even if the model prefers to answer with text.
Each function in `SCENARIOS` is a scenario; its name describes the expected behavior. The run ends at the first failure.
"""

import json
import sys

import openai
import scenarios
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "Is it warmer in Paris or in London?"}]


class get_weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


class compare(BaseModel):
    """Which of two numbers is greater."""

    one: int
    other: int


TOOLS = [openai.pydantic_function_tool(get_weather), openai.pydantic_function_tool(compare)]
PLAIN = [{"type": "function", "function": {"name": tool["function"]["name"]}} for tool in TOOLS]
EXPECTED = [
    ("I will look.\n", [("get_weather", {"city": "Paris", "days": 1})]),
    (None, [("get_weather", {"city": "London", "days": 1}), ("compare", {"one": 21, "other": -4})]),
    ("Paris is warmer.", []),
]


def turn(message):
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    return message.content or None, calls


def results(message):
    return [{"role": "tool", "tool_call_id": call.id, "content": "21"} for call in message.tool_calls or []]


def loop(ask):
    messages, turns, ids = list(QUESTION), [], []
    while True:
        message, reason = ask(messages)
        turns.append(turn(message))
        assert reason == ("tool_calls" if message.tool_calls else "stop"), reason
        if not message.tool_calls:
            break
        ids += [call.id for call in message.tool_calls]
        messages += [message.model_dump(exclude_none=True), *results(message)]
    assert turns == EXPECTED, turns
    assert len(set(ids)) == 3 and all(len(id) == 29 and id.startswith("call_") for id in ids), ids


def a_loop_of_three_turns(client, model):
    def ask(messages):
        answer = client.chat.completions.create(model=model, messages=messages, tools=PLAIN, temperature=0)
        assert answer.choices[0].message.reasoning_content == "Let me see.\n", answer
        return answer.choices[0].message, answer.choices[0].finish_reason

    loop(ask)


def a_loop_of_three_streamed_turns(client, model):
    def ask(messages):
        with client.chat.completions.stream(model=model, messages=messages, tools=TOOLS, temperature=0) as stream:
            arguments, done = {}, []
            for event in stream:
                if event.type == "tool_calls.function.arguments.delta":
                    arguments[event.index] = arguments.get(event.index, "") + event.arguments_delta
                    assert arguments[event.index] == event.arguments, event
                elif event.type == "tool_calls.function.arguments.done":
                    done.append(event)
            answer = stream.get_final_completion()
        message = answer.choices[0].message
        for call, event in zip(message.tool_calls or [], done, strict=True):
            assert event.name == call.function.name and arguments[event.index] == call.function.arguments, event
            assert isinstance(call.function.parsed_arguments, BaseModel), call
        return message, answer.choices[0].finish_reason

    loop(ask)


def chunks_of_a_call_are_as_openai_sends_them(client, model):
    stream = client.chat.completions.create(model=model, messages=QUESTION, tools=PLAIN, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    assert deltas[0].role == "assistant" and all(delta.role is None for delta in deltas[1:]), deltas
    first, *rest = [call for delta in deltas for call in delta.tool_calls or []]
    assert (first.index, first.type, first.function.name, first.function.arguments) == (0, "function", "get_weather", "")
    assert first.id.startswith("call_"), first
    for piece in rest:
        assert (piece.index, piece.id, piece.type, piece.function.name) == (0, None, None, None), piece
        assert piece.function.arguments, piece
    assert json.loads("".join(piece.function.arguments for piece in rest)) == EXPECTED[0][1][0][1], rest


def calls_are_parsed_into_models(client, model):
    answer = client.chat.completions.parse(model=model, messages=QUESTION, tools=TOOLS, temperature=0)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == get_weather(city="Paris", days=1), call


def one_call_at_a_time_on_request(client, model):
    def ask(messages):
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=PLAIN, temperature=0, parallel_tool_calls=False
        )
        return answer.choices[0].message

    first = ask(QUESTION)
    second = ask([*QUESTION, first.model_dump(exclude_none=True), *results(first)])
    assert turn(second)[1] == EXPECTED[1][1][:1], second


def no_call_with_tool_choice_none(client, model):
    answer = client.chat.completions.create(model=model, messages=QUESTION, tools=PLAIN, tool_choice="none")
    assert answer.choices[0].message.tool_calls is None and "get_weather" in answer.choices[0].message.content, answer


def required_calls_in_three_turns(client, model):
    named = {"type": "function", "function": {"name": "compare"}}
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_weather"}}]},
    }
    messages = list(QUESTION)
    for choice, names in [("required", ["get_weather", "compare"]), (named, ["compare"]), (allowed, ["get_weather"])]:
        arguments = dict(
            model=model, messages=messages, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=200,
            parallel_tool_calls=False,
        )
        answer = client.chat.completions.parse(**arguments).choices[0]
        assert answer.finish_reason == "tool_calls", answer
        (call,) = answer.message.tool_calls
        assert call.function.name in names and isinstance(call.function.parsed_arguments, BaseModel), call
        with client.chat.completions.stream(**arguments) as stream:
            streamed = stream.get_final_completion().choices[0].message
        assert turn(streamed) == turn(answer.message), (streamed, answer)
        messages += [answer.message.model_dump(exclude_none=True), *results(answer.message)]


SCENARIOS = {
    "scripted": [
        a_loop_of_three_turns,
        a_loop_of_three_streamed_turns,
        chunks_of_a_call_are_as_openai_sends_them,
        calls_are_parsed_into_models,
        one_call_at_a_time_on_request,
        no_call_with_tool_choice_none,
    ],
    "required": [required_calls_in_three_turns],
}


url, model, kind = sys.argv[1:]
scenarios.run(SCENARIOS[kind], url, model)
