#!/usr/bin/env python3
"""Writes families.json: the templates in ../templates, rendered by Jinja with the settings of `transformers`.

Requires only Jinja2 3.1. The conversations have the form in which the server passes them to a template.
"""

from __future__ import annotations

import datetime
import json
import pathlib

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = pathlib.Path(__file__).parent
NOW_SECONDS = 1721999109
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Weather in Zürich?"}
ARGUMENTS = {"city": "Zürich", "days": 3, "options": {"metric": True, "tags": ["a", 'b"c'], "note": None, "x": 1.5}}
# Templates use different names for the same options.
THINK = {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
NO_THINK = {"enable_thinking": False, "thinking": False}


def call(identifier: str, name: str, arguments: dict) -> dict:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*made: dict, **more: str | None) -> dict:
    return {"role": "assistant", "content": ""} | more | {"tool_calls": list(made)}


def result(identifier: str, content: str) -> dict:
    return {"role": "tool", "tool_call_id": identifier, "content": content}


def thought(text: str) -> dict:
    return {"thinking": text, "reasoning_content": text}


WEATHER = call("abcdefghi", "get_weather", ARGUMENTS)
NOON = call("abcdefghj", "now", {})
CONVERSATIONS = {
    "talk": [SYSTEM, USER, {"role": "assistant", "content": "Fine."}, {"role": "user", "content": "And <b>now</b>? 😀"}],
    "call": [SYSTEM, USER, calls(WEATHER), result("abcdefghi", '{"t": 20}')],
    "null": [SYSTEM, USER, calls(WEATHER, content=None), result("abcdefghi", '{"t": 20}')],
    "thought": [SYSTEM, USER, calls(WEATHER, **thought("I need it.")), result("abcdefghi", '{"t": 20}')],
    "two": [SYSTEM, USER, calls(WEATHER, NOON), result("abcdefghi", "20"), result("abcdefghj", "12:00")],
    "turns": [
        SYSTEM,
        USER,
        calls(WEATHER),
        result("abcdefghi", "20"),
        calls(NOON),
        result("abcdefghj", "12:00"),
        {"role": "assistant", "content": "20 degrees at noon.", **thought("Both.")},
        {"role": "user", "content": "Thanks"},
    ],
}
CASES = [
    ("talk", False, None),
    ("talk", True, THINK),
    ("call", True, None),
    ("null", True, None),
    ("thought", True, THINK),
    ("two", True, NO_THINK),
    ("turns", True, None),
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Gets "weather" <now> — °C',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Zürich", "Bern"], "description": "Where"},
                    "days": {"type": "integer", "default": 3},
                    "options": {"type": "object", "properties": {"metric": {"type": "boolean"}}},
                    "list": {"type": ["array", "null"], "items": {"type": "number"}},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]


class Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks training targets and renders its content unchanged."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("printed"), [], [], body).set_lineno(line)

    def printed(self, caller) -> str:
        return caller()


def environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        more = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **more)

    def strftime_now(form):
        return datetime.datetime.fromtimestamp(NOW_SECONDS, datetime.timezone.utc).strftime(form)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return made


def rendered(template: jinja2.Template, conversation: str, with_tools: bool, extra: dict | None) -> dict:
    """Returns the result: a text, the message of `raise_exception`, or a failure."""
    variables = {
        "messages": json.loads(json.dumps(CONVERSATIONS[conversation])),
        "tools": json.loads(json.dumps(TOOLS)) if with_tools else None,
        "documents": None,
        "add_generation_prompt": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    try:
        return {"text": template.render(variables | (extra or {}))}
    except jinja2.exceptions.TemplateError as error:
        return {"refused": str(error)} if type(error) is jinja2.exceptions.TemplateError else {"failed": True}
    except (TypeError, ValueError):
        return {"failed": True}


def main() -> None:
    cases = []
    for path in sorted((HERE.parent / "templates").glob("*.jinja")):
        template = environment().from_string(path.read_text())
        for conversation, with_tools, extra in CASES:
            case = {"template": path.stem, "conversation": conversation, "tools": with_tools, "extra": extra}
            cases.append(case | rendered(template, conversation, with_tools, extra))
    golden = {"now_seconds": NOW_SECONDS, "tools": TOOLS, "conversations": CONVERSATIONS, "cases": cases}
    (HERE / "families.json").write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
