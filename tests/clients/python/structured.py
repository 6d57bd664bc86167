"""Tests structured outputs with the official Python client. Usage: structured.py BASE_URL MODEL

Structured output is enforced even if the model prefers other output. Each function is a scenario; its name describes
the expected behavior. The run ends at the first failure.
"""

import json
import re
import sys
from enum import Enum
from typing import Literal

import openai
import scenarios
from pydantic import BaseModel, Field

PROMPT = [{"role": "user", "content": "Tell me about the weather in Paris, in JSON."}]


class Sky(str, Enum):
    clear = "clear"
    cloudy = "cloudy"


class Day(BaseModel):
    degrees: int = Field(ge=-50, le=60)
    sky: Sky


class Weather(BaseModel):
    city: str = Field(max_length=30)
    unit: Literal["C", "F"]
    days: list[Day] = Field(min_length=1, max_length=3)
    note: str | None = Field(max_length=20)


class Report(BaseModel):
    """Reports the weather."""

    city: str = Field(max_length=30)
    degrees: int = Field(ge=-50, le=60)


# At this temperature, an answer may contain so much whitespace that it does not end within `max_tokens`. Requests with
# these options therefore set a seed, so that each run samples the same answers.
OPTIONS = {"max_tokens": 400, "temperature": 1.0}


def parses_pydantic_models(client, model):
    for seed in range(4):
        completion = client.chat.completions.parse(
            model=model, messages=PROMPT, response_format=Weather, seed=seed, **OPTIONS
        )
        choice = completion.choices[0]
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Weather), completion


def streams_pydantic_models(client, model):
    arguments = dict(model=model, messages=PROMPT, response_format=Weather, seed=0, **OPTIONS)
    with client.chat.completions.stream(**arguments) as stream:
        kinds = {event.type for event in stream}
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Weather) and {"chunk", "content.delta", "content.done"} <= kinds, kinds


def parses_every_choice_with_logprobs(client, model):
    completion = client.chat.completions.parse(
        model=model, messages=PROMPT, response_format=Weather, n=3, seed=7, logprobs=True, top_logprobs=2, **OPTIONS
    )
    assert len(completion.choices) == 3
    for choice in completion.choices:
        assert isinstance(choice.message.parsed, Weather), choice
        assert "".join(token.token for token in choice.logprobs.content) == choice.message.content


def parses_arguments_of_strict_tools(client, model):
    tools = [openai.pydantic_function_tool(Report)]
    for tool_choice in ["required", {"type": "function", "function": {"name": "Report"}}]:
        completion = client.chat.completions.parse(
            model=model,
            messages=PROMPT,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=False,
            seed=0,
            **OPTIONS,
        )
        choice = completion.choices[0]
        assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1, choice
        assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Report), choice


def parses_responses(client, model):
    response = client.responses.parse(
        model=model, input=PROMPT[0]["content"], text_format=Weather, max_output_tokens=400, temperature=0
    )
    assert isinstance(response.output_parsed, Weather), response


def enforces_other_forms(client, model):
    def ask(**extra):
        arguments = dict(model=model, messages=PROMPT, extra_body=extra, seed=0, **OPTIONS)
        completion = client.chat.completions.create(**arguments)
        choice = completion.choices[0]
        assert choice.finish_reason == "stop", choice
        return choice.message.content

    assert ask(structured_outputs={"choice": ["yes", "no"]}) in {"yes", "no"}
    assert ask(guided_choice=["rain", "sun"]) in {"rain", "sun"}
    assert re.fullmatch(r"\d{4}-\d{2}", ask(structured_outputs={"regex": r"\d{4}-\d{2}"}))
    ebnf = 'root ::= "(" root? ")" | [a-z]{1,3}'
    assert re.fullmatch(r"\(*[a-z]{0,3}\)*", ask(structured_outputs={"grammar": ebnf}))
    lark = 'start: "a" NUMBER\nNUMBER: /[0-9]{1,3}/'
    assert re.fullmatch(r"a\d{1,3}", ask(structured_outputs={"grammar": lark}))
    assert ask(response_format={"type": "const_string", "value": "Hello World!"}) == "Hello World!"
    tag = {"type": "tag", "begin": "<t>", "content": {"type": "regex", "pattern": "[ab]{1,4}"}, "end": "</t>"}
    assert re.fullmatch("<t>[ab]{1,4}</t>", ask(response_format={"type": "structural_tag", "format": tag}))


def enforces_forms_in_completions(client, model):
    schema = Day.model_json_schema()
    completion = client.completions.create(
        model=model, prompt="The weather: ", max_tokens=400, temperature=0, extra_body={"guided_json": schema}
    )
    assert completion.choices[0].finish_reason == "stop", completion
    Day.model_validate_json(completion.choices[0].text)


def says_where_a_schema_is_wrong(client, model):
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    try:
        client.chat.completions.create(model=model, messages=PROMPT, response_format=wanted)
    except openai.BadRequestError as error:
        assert error.param == "response_format.json_schema.schema.properties.tags", error
        assert "uniqueItems" in error.message, error
    else:
        raise AssertionError("the request was not rejected")


def json_object_mode_returns_objects(client, model):
    kinds = []
    for seed in range(3):
        completion = client.chat.completions.create(
            model=model, messages=PROMPT, response_format={"type": "json_object"}, seed=seed, **OPTIONS
        )
        choice = completion.choices[0]
        if choice.finish_reason == "stop":
            kinds.append(type(json.loads(choice.message.content)))
    assert all(kind is dict for kind in kinds), kinds


SCENARIOS = [
    parses_pydantic_models,
    streams_pydantic_models,
    parses_every_choice_with_logprobs,
    parses_arguments_of_strict_tools,
    parses_responses,
    enforces_other_forms,
    enforces_forms_in_completions,
    says_where_a_schema_is_wrong,
    json_object_mode_returns_objects,
]

scenarios.run(SCENARIOS, *sys.argv[1:])
