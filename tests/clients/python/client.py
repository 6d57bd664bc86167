"""Tests the server with the official Python client. Usage: client.py BASE_URL MODEL

Each scenario is a function whose name describes the expected behavior. The run ends at the first failure.
"""

import asyncio
import sys

import openai
import scenarios

PARIS = [{"role": "user", "content": "What is the capital of France?"}]
FACTS = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "Name three colours of the rainbow."},
]


def expect_error(kind, status, call, param=None):
    try:
        call()
    except openai.APIStatusError as error:
        assert isinstance(error, kind), f"{type(error).__name__}, not {kind.__name__}: {error}"
        assert error.status_code == status, error.status_code
        assert error.body and error.body["message"], error.body
        assert param is None or error.param == param, (error.param, error.body)
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def models_are_listed_and_retrieved(client, model):
    listed = client.models.list()
    assert model in [entry.id for entry in listed.data], listed
    found = client.models.retrieve(model)
    assert (found.id, found.object) == (model, "model"), found
    expect_error(openai.NotFoundError, 404, lambda: client.models.retrieve("no-such-model"))


def chat_says_paris(client, model):
    answer = client.chat.completions.create(model=model, messages=PARIS, temperature=0)
    assert answer.object == "chat.completion" and answer.model == model, answer
    assert answer.id and answer.created > 0 and answer.system_fingerprint, answer
    (choice,) = answer.choices
    assert "Paris" in choice.message.content, choice
    assert (choice.index, choice.message.role, choice.finish_reason) == (0, "assistant", "stop"), choice
    usage = answer.usage
    assert usage.prompt_tokens > 0 and usage.completion_tokens > 0, usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
    assert usage.prompt_tokens_details.cached_tokens >= 0, usage


def a_streamed_chat_equals_a_whole_answer(client, model):
    arguments = dict(model=model, messages=FACTS, temperature=0, max_tokens=40)
    whole = client.chat.completions.create(**arguments)
    stream = client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    text, finish, usage, ids, roles = "", None, None, set(), []
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk", chunk
        ids.add(chunk.id)
        if chunk.usage:
            assert usage is None and not chunk.choices, "only the last chunk has usage, and it has no choices"
            usage = chunk.usage
            continue
        (choice,) = chunk.choices
        assert finish is None, "no choice follows the finish reason"
        text += choice.delta.content or ""
        roles += [choice.delta.role] if choice.delta.role else []
        finish = choice.finish_reason
    assert text == whole.choices[0].message.content, (text, whole.choices[0].message.content)
    assert finish == whole.choices[0].finish_reason
    assert len(ids) == 1 and roles == ["assistant"], (ids, roles)
    assert usage.completion_tokens == whole.usage.completion_tokens, (usage, whole.usage)
    assert usage.prompt_tokens == whole.usage.prompt_tokens, (usage, whole.usage)


def a_stream_without_include_usage_has_none(client, model):
    stream = client.chat.completions.create(model=model, messages=PARIS, max_tokens=4, stream=True)
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in stream)


def completions_continue_a_prompt(client, model):
    arguments = dict(model=model, prompt="The capital of France is", temperature=0, max_tokens=8)
    whole = client.completions.create(**arguments)
    assert whole.object == "text_completion" and "Paris" in whole.choices[0].text, whole
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 8, whole
    streamed = "".join(
        chunk.choices[0].text for chunk in client.completions.create(**arguments, stream=True) if chunk.choices
    )
    assert streamed == whole.choices[0].text, (streamed, whole.choices[0].text)


def logprobs_are_those_of_the_tokens(client, model):
    answer = client.chat.completions.create(
        model=model, messages=PARIS, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens, content
    assert "".join(token.token for token in content) == answer.choices[0].message.content, content
    for token in content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3, token
        best = token.top_logprobs[0]
        assert best.token == token.token and abs(best.logprob - token.logprob) < 1e-4, token
        ordered = [candidate.logprob for candidate in token.top_logprobs]
        assert ordered == sorted(ordered, reverse=True), token
        assert bytes(token.bytes).decode("utf-8", "replace") == token.token, token
    legacy = client.completions.create(
        model=model, prompt="The capital of France is", temperature=0, max_tokens=3, logprobs=2
    ).choices[0].logprobs
    assert len(legacy.tokens) == len(legacy.token_logprobs) == len(legacy.top_logprobs) == 3, legacy
    assert legacy.text_offset[0] <= legacy.text_offset[1] <= legacy.text_offset[2], legacy


def n_gives_several_choices_reproducibly(client, model):
    arguments = dict(model=model, messages=FACTS, temperature=1.0, n=2, seed=7, max_tokens=16)
    first = client.chat.completions.create(**arguments)
    assert sorted(choice.index for choice in first.choices) == [0, 1], first
    again = client.chat.completions.create(**arguments)
    texts = [[choice.message.content for choice in answer.choices] for answer in (first, again)]
    assert texts[0] == texts[1], texts
    assert texts[0][0] != texts[0][1], "two draws of 16 tokens at temperature 1 are the same"
    streamed = ["", ""]
    for chunk in client.chat.completions.create(**arguments, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts[0], (streamed, texts[0])


def stop_strings_end_the_text_before_them(client, model):
    arguments = dict(model=model, messages=PARIS, temperature=0)
    whole = client.chat.completions.create(**arguments).choices[0].message.content
    # The string begins inside a word and ends with the space after that word, so it does not consist of whole tokens.
    stop = whole[whole.index("ital of") :][:5]
    for stops in (stop, ["never in the text", stop]):
        answer = client.chat.completions.create(**arguments, stop=stops)
        assert answer.choices[0].message.content == whole[: whole.index(stop)], answer
        assert answer.choices[0].finish_reason == "stop", answer
    stream = client.chat.completions.create(**arguments, stop=stop, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert streamed == whole[: whole.index(stop)], streamed


def parameters_beyond_openai_are_accepted(client, model):
    answer = client.chat.completions.create(
        model=model,
        messages=PARIS,
        max_tokens=30,
        temperature=1.5,
        extra_body={"top_k": 1, "min_tokens": 30, "ignore_eos": True, "repetition_penalty": 1.0, "no_such_field": 1},
    )
    assert answer.usage.completion_tokens == 30 and answer.choices[0].finish_reason == "length", answer
    assert "Paris" in answer.choices[0].message.content, "top_k 1 is greedy at any temperature"
    banned = client.chat.completions.create(
        model=model, messages=PARIS, max_tokens=12, temperature=0, logprobs=True, frequency_penalty=2.0
    )
    assert banned.choices[0].message.content, banned


def a_repeated_prompt_is_cached(client, model):
    for animal in ["fox", "dog", "cat", "cow", "hen"]:
        content = f"Repeat after me. The {animal} says: " + f"The quick brown {animal} jumps over it. " * 20
        messages = [{"role": "user", "content": content}]
        client.chat.completions.create(model=model, messages=messages, max_tokens=1)
        # The second request follows without a pause, because a router must choose the same replica even before the
        # replica's next load report arrives.
        usage = client.chat.completions.create(model=model, messages=messages, max_tokens=1).usage
        cached = usage.prompt_tokens_details.cached_tokens
        assert usage.prompt_tokens / 2 < cached < usage.prompt_tokens, usage


def errors_are_typed(client, model):
    def chat(**changed):
        return lambda: client.chat.completions.create(**{"model": model, "messages": PARIS, "max_tokens": 4} | changed)

    expect_error(openai.NotFoundError, 404, chat(model="no-such-model"))
    for param, value in [("temperature", 9), ("top_p", 1.5), ("n", 0), ("max_tokens", 0), ("top_logprobs", 99)]:
        more = {"logprobs": True} if param == "top_logprobs" else {}
        expect_error(openai.BadRequestError, 400, chat(**{param: value}, **more), param)
    expect_error(openai.BadRequestError, 400, chat(temperature="hot"), "temperature")
    expect_error(openai.BadRequestError, 400, chat(messages=[]), "messages")
    long = [{"role": "user", "content": "word " * 20_000}]
    expect_error(openai.BadRequestError, 400, chat(messages=long))


def concurrent_requests_are_all_answered(client, model):
    async def ask(many, number):
        messages = [{"role": "user", "content": f"What is {number} plus {number}?"}]
        stream = await many.chat.completions.create(
            model=model, messages=messages, temperature=0, max_tokens=16, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all():
        settings = dict(base_url=client.base_url, api_key="unused", max_retries=0, timeout=300)
        async with openai.AsyncOpenAI(**settings) as many:
            return await asyncio.gather(*(ask(many, number) for number in range(32)))

    together = asyncio.run(ask_all())
    assert all(together) and len(set(together)) > 16, together


SCENARIOS = [
    models_are_listed_and_retrieved,
    chat_says_paris,
    a_streamed_chat_equals_a_whole_answer,
    a_stream_without_include_usage_has_none,
    completions_continue_a_prompt,
    logprobs_are_those_of_the_tokens,
    n_gives_several_choices_reproducibly,
    stop_strings_end_the_text_before_them,
    parameters_beyond_openai_are_accepted,
    a_repeated_prompt_is_cached,
    errors_are_typed,
    concurrent_requests_are_all_answered,
]


scenarios.run(SCENARIOS, *sys.argv[1:])
