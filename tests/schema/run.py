"""Runs schemathesis against a server for a bounded time. Usage: run.py BASE_URL MODEL SECONDS

The requests name the server's model, because requests for other models are rejected before anything else is validated.
In the first half of the time, they use only parameters that can be combined, so that the requests succeed; in the second
half, they use all parameters. Additional arguments are passed to schemathesis.
"""

import copy
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

# Checks that no response is a server error, and that the status, type and body of each response match the document.
CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
]


# Parameters that can be combined. Requests with all parameters are nearly always rejected, because some parameters exclude
# others.
COMMON = {
    "model", "messages", "prompt", "input", "text", "tokens", "tools", "max_tokens", "max_output_tokens", "temperature",
    "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty", "stream", "user", "metadata", "store", "instructions",
    "parallel_tool_calls", "add_special_tokens", "skip_special_tokens", "ignore_eos",
}
TOKENS_MAX = 8

# Valid requests: the first phase of schemathesis sends them unchanged, and later phases mutate them.
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
EXAMPLES = {
    "/v3/chat/completions": [
        {"messages": MESSAGES, "max_tokens": TOKENS_MAX},
        {"messages": MESSAGES, "max_tokens": TOKENS_MAX, "stream": True, "tools": [TOOL]},
    ],
    "/v3/completions": [
        {"prompt": "Hello", "max_tokens": TOKENS_MAX},
        {"prompt": ["a", "b"], "max_tokens": TOKENS_MAX, "stream": True},
    ],
    "/v3/responses": [
        {"input": "Hello", "max_output_tokens": TOKENS_MAX},
        {
            "input": [{"role": "user", "content": "Hello"}],
            "max_output_tokens": TOKENS_MAX,
            "stream": True,
            "tools": [TOOL, {"type": "namespace", "name": "n", "tools": [TOOL]}, {"type": "web_search"}],
        },
    ],
    "/v3/tokenize": [{"text": "Hello"}, {"messages": MESSAGES}],
}


def adapted(document, model, common):
    """Returns the document for a run. Requests can name only the model `model`; if `common`, they can have only
    parameters that can be combined."""
    document = copy.deepcopy(document)
    # `/v1` is `/v3` under another name.
    document["paths"] = {path: item for path, item in document["paths"].items() if not path.startswith("/v1/")}
    for schema in document["components"]["schemas"].values():
        properties = schema.get("properties", {})
        if "x-words" not in properties.get("model", {}):
            continue
        properties["model"]["enum"] = [model]
        if common:
            schema["properties"] = {name: value for name, value in properties.items() if name in COMMON}
            schema["required"] = ["model", *(name for name in ("messages", "prompt", "input", "text", "tokens") if name in properties)][:2]
            for name in ("max_tokens", "max_output_tokens"):
                if name in schema["properties"]:
                    schema["properties"][name] |= {"minimum": 1, "maximum": TOKENS_MAX}
    # The schema of an event stream in our document, like that in OpenAI's, describes only the data of an event, but
    # schemathesis expects the schema of the whole event.
    for item in document["paths"].values():
        for operation in item.values():
            operation["responses"]["200"].get("content", {}).get("text/event-stream", {}).pop("schema", None)
    for path, examples in EXAMPLES.items():
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        content["examples"] = {
            str(number): {"value": {"model": model, **example}} for number, example in enumerate(examples)
        }
    return document


def run(document, url, seconds, more):
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory, "openapi.json")
        path.write_text(json.dumps(document))
        st = pathlib.Path(sys.executable).with_name("st")
        command = [st, "run", path, "--url", url, "--checks", ",".join(CHECKS), "--max-time", str(seconds)]
        # The same seed generates the same requests, although a slower run sends fewer of them.
        command += ["--seed", os.environ.get("SEED", "1")]
        command += ["--generation-database", "none", "--no-color", "--warnings", "off", *more]
        ended = subprocess.run(command, cwd=directory, check=False)
    if ended.returncode:
        sys.exit(ended.returncode)


def answered(url):
    """Returns the number of successful requests by endpoint."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    sign = 'requests_total{endpoint="%s",outcome="ok"'
    return {
        name: sum(float(line.split()[-1]) for line in lines if sign % name in line)
        for name in ("chat_completions", "completions", "responses", "tokenize")
    }


def main():
    url, model, seconds, *more = sys.argv[1:]
    with urllib.request.urlopen(f"{url}/openapi.json") as answer:
        document = json.load(answer)
    for common in (True, False):
        run(adapted(document, model, common), url, int(seconds) // 2, more)
    # A run in which an endpoint rejects every request would prove little.
    counts = answered(url)
    assert all(counts.values()), counts
    print("answered:", counts)
    print("schemathesis passed")


main()
