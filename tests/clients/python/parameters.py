"""Tests the parameters of completions and chats with the official Python client. Usage: parameters.py BASE_URL MODEL

Each scenario is a function whose name describes the expected behavior. The run ends at the first failure.
"""

import inspect
import json
import math
import sys

import openai
import scenarios
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

PROMPT = "The capital of France is"


def an_echoed_prompt_has_the_log_probabilities_of_its_tokens(client, model):
    arguments = dict(model=model, temperature=0, logprobs=3)
    ids = {"return_token_ids": True}
    generated = client.completions.create(prompt=PROMPT, max_tokens=8, extra_body=ids, **arguments).choices[0]
    # `logprobs` has no entry for a stop token that ends the answer, so omit the ID of this token.
    tokens = generated.prompt_token_ids + generated.token_ids[: len(generated.logprobs.tokens)]
    echoed = client.completions.create(
        prompt=tokens, max_tokens=0, echo=True, extra_body={"prompt_logprobs": 0}, **arguments
    )
    (choice,) = echoed.choices
    assert choice.text == PROMPT + generated.text, choice
    assert echoed.usage.completion_tokens == 0, echoed.usage
    logprobs = choice.logprobs
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None, logprobs
    count = len(generated.logprobs.tokens)
    assert logprobs.tokens[-count:] == generated.logprobs.tokens, (logprobs.tokens, generated.logprobs.tokens)
    for one, other in zip(logprobs.token_logprobs[-count:], generated.logprobs.token_logprobs):
        # The echoed tokens are computed in prefill and the generated ones in decode, so rounding errors differ.
        assert math.isclose(one, other, abs_tol=0.05), (one, other)
    for token, offset in zip(logprobs.tokens, logprobs.text_offset):
        assert choice.text[offset:].startswith(token), (token, offset)
    # This field of vLLM's API contains the same log probabilities.
    scores = choice.prompt_logprobs
    assert scores[0] is None and len(scores) == len(logprobs.tokens), scores
    for score, logprob in zip(scores[1:], logprobs.token_logprobs[1:]):
        (entry,) = score.values()
        assert math.isclose(entry["logprob"], logprob, abs_tol=1e-4) and entry["rank"] >= 1, (entry, logprob)


def an_echo_with_log_probabilities_streams(client, model):
    arguments = dict(model=model, prompt=PROMPT, temperature=0, max_tokens=4, echo=True, logprobs=1)
    whole = client.completions.create(**arguments).choices[0]
    text, tokens = "", []
    for chunk in client.completions.create(**arguments, stream=True):
        (choice,) = chunk.choices
        text += choice.text
        tokens += choice.logprobs.tokens if choice.logprobs else []
    assert (text, tokens) == (whole.text, whole.logprobs.tokens), (text, whole)


def the_best_of_several_has_the_greatest_log_probability_per_token(client, model):
    arguments = dict(model=model, prompt=PROMPT, temperature=1.5, max_tokens=6, logprobs=0, seed=7)

    def mean(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    ignore = {"ignore_eos": True}
    every = client.completions.create(**arguments, n=5, extra_body=ignore).choices
    best = client.completions.create(**arguments, best_of=5, extra_body=ignore)
    (choice,) = best.choices
    assert math.isclose(mean(choice), max(map(mean, every)), abs_tol=0.02), (choice, [mean(one) for one in every])
    assert best.usage.completion_tokens == 30, best.usage


def banned_words_and_allowed_tokens_are_respected(client, model):
    arguments = dict(model=model, prompt=PROMPT, temperature=0, max_tokens=6)
    plain = client.completions.create(**arguments, extra_body={"return_token_ids": True}).choices[0]
    word = plain.text.split()[0].strip(".,")
    banned = client.completions.create(**arguments, extra_body={"bad_words": [word]}).choices[0]
    assert word not in banned.text, (word, banned.text)
    tokens = plain.token_ids
    only = client.completions.create(**arguments, extra_body={"allowed_token_ids": tokens, "return_token_ids": True})
    assert set(only.choices[0].token_ids) <= set(tokens), (only, tokens)


def a_text_has_the_tokens_that_the_endpoints_count(client, model):
    def post(path, **body):
        return client.post(path, cast_to=object, body={"model": model, **body})

    tokens = post("/tokenize", text=PROMPT)["tokens"]
    completion = client.completions.create(model=model, prompt=PROMPT, max_tokens=1)
    assert completion.usage.prompt_tokens == len(tokens), (completion.usage, tokens)
    assert PROMPT in post("/detokenize", tokens=tokens)["text"]
    messages = [{"role": "user", "content": PROMPT}]
    chat = client.chat.completions.create(model=model, messages=messages, max_tokens=1)
    assert post("/tokenize", messages=messages)["count"] == chat.usage.prompt_tokens, chat.usage
    cut = client.completions.create(model=model, prompt=PROMPT, max_tokens=1, extra_body={"truncate_prompt_tokens": 3})
    assert cut.usage.prompt_tokens == 3, cut.usage


def parameters_of_openai_are_accepted(client, model):
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Hi"}],
        max_completion_tokens=2,
        user="someone",
        safety_identifier="someone",
        prompt_cache_key="key",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        verbosity="low",
        prediction={"type": "content", "content": "Hello"},
        modalities=["text"],
        parallel_tool_calls=False,
        logit_bias={"5": -1},
    )
    assert answer.usage.completion_tokens <= 2, answer


def the_best_beams_are_other_texts_and_the_same_each_time(client, model):
    arguments = dict(model=model, prompt=PROMPT, max_tokens=6, n=3, extra_body={"use_beam_search": True})
    texts = [[choice.text for choice in client.completions.create(**arguments).choices] for _ in range(2)]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3, texts


def values_out_of_range_are_rejected(client, model):
    cases = [
        (dict(temperature=2.5), "temperature", "decimal_above_max_value"),
        (dict(n=0), "n", "integer_below_min_value"),
        (dict(top_p="all"), "top_p", "invalid_type"),
        (dict(extra_body={"use_beam_search": True}, stream=True), "use_beam_search", "invalid_value"),
        (dict(extra_body={"min_p": 2}), "min_p", "decimal_above_max_value"),
    ]
    for arguments, param, code in cases:
        try:
            client.completions.create(model=model, prompt=PROMPT, max_tokens=1, **arguments)
        except openai.BadRequestError as error:
            assert (error.param, error.code) == (param, code), error
        else:
            raise AssertionError(f"{arguments} was accepted")


def every_parameter_of_the_client_is_in_the_openapi_document(client, model):
    server = str(client.base_url).removesuffix("/v3/")
    try:
        document = client.get(server + "/openapi.json", cast_to=object)
    except openai.NotFoundError:
        # A router does not serve this document; only the servers behind it do.
        return
    schemas = document["components"]["schemas"]
    for method, schema in [
        (client.chat.completions.create, "ChatRequest"),
        (client.completions.create, "CompletionRequest"),
        (client.responses.create, "ResponsesRequest"),
    ]:
        own = ("extra_headers", "extra_query", "extra_body", "timeout")
        known = schemas[schema]["properties"]
        unknown = [name for name in inspect.signature(method).parameters if name not in own and name not in known]
        assert not unknown, f"{schema} lacks {unknown}"


def answers_are_of_the_clients_types(client, model):
    # The client does not validate responses by default. Strict validation against its types detects missing fields
    # and values of the wrong type.
    messages = [{"role": "user", "content": "Hi"}]
    common = dict(model=model, max_tokens=4, seed=1, n=2)
    chat = client.chat.completions.with_raw_response
    whole = chat.create(messages=messages, logprobs=True, top_logprobs=2, **common)
    ChatCompletion.model_validate_json(whole.text, strict=True)
    streamed = chat.create(
        messages=messages, logprobs=True, stream=True, stream_options={"include_usage": True}, **common
    )
    for chunk in data(streamed):
        ChatCompletionChunk.model_validate_json(chunk, strict=True)
    texts = client.completions.with_raw_response
    # Answers with `echo` are not validated: the log probability of the first prompt token is null, which the client's
    # types do not allow.
    Completion.model_validate_json(texts.create(prompt=PROMPT, logprobs=2, **common).text, strict=True)
    for chunk in data(texts.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **common)):
        # The client uses the same type for whole completions and for chunks. The type requires a finish reason, which
        # most chunks do not have.
        part = json.loads(chunk)
        for choice in part["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate_json(json.dumps(part), strict=True)


def data(streamed):
    """Returns the JSON text of each event of a stream."""
    lines = streamed.http_response.read().decode().split("\n")
    said = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert said[-1] == "[DONE]" and len(said) > 3, said
    return said[:-1]


SCENARIOS = [
    every_parameter_of_the_client_is_in_the_openapi_document,
    answers_are_of_the_clients_types,
    an_echoed_prompt_has_the_log_probabilities_of_its_tokens,
    an_echo_with_log_probabilities_streams,
    the_best_of_several_has_the_greatest_log_probability_per_token,
    banned_words_and_allowed_tokens_are_respected,
    a_text_has_the_tokens_that_the_endpoints_count,
    parameters_of_openai_are_accepted,
    the_best_beams_are_other_texts_and_the_same_each_time,
    values_out_of_range_are_rejected,
]


scenarios.run(SCENARIOS, *sys.argv[1:])
