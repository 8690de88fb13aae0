#!/usr/bin/env python3
"""openai_client.py BASE_URL MODEL: what applications do with OpenAI's Python client, unmodified.

Prints one JSON object a line for each check that held; the first one that does not ends it with a traceback.
"""

import asyncio
import json
import sys

import openai

BASE_URL, MODEL = sys.argv[1:3]
TOOL = {
    "type": "function",
    "function": {
        "name": "gate_level",
        "description": "The water level at a gate.",
        "parameters": {"type": "object", "properties": {"gate": {"type": "integer"}}, "required": ["gate"]},
    },
}
SYSTEM = "You keep the gates of a power station. " + "Open them slowly, close them slowly, and note each change. " * 40

client = openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0, timeout=120)


def report(check, **fields):
    print(json.dumps({"check": check, **fields}), flush=True)


def models():
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    report("models")


def sync():
    answer = client.chat.completions.create(
        model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "Which gate is open?"}]
    )
    assert answer.usage.completion_tokens <= 8 and answer.choices[0].finish_reason in ("length", "stop")
    text = client.completions.create(model=MODEL, prompt="The level rises", max_tokens=4)
    assert text.usage.prompt_tokens > 0
    report("sync")


def streaming():
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            max_tokens=16,
            messages=[{"role": "user", "content": "Describe the basin."}],
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 16
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    plain = list(
        client.completions.create(
            model=MODEL, prompt="Once", max_tokens=5, stream=True, extra_body={"ignore_eos": True}
        )
    )
    assert all(c.usage is None for c in plain), "usage that nobody asked for"
    report("streaming", chunks=len(chunks))


def tools():
    messages = [
        {"role": "user", "content": "How high is the water at gate 7?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call-1", "type": "function", "function": {"name": "gate_level", "arguments": '{"gate": 7}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call-1", "content": '{"metres": 3.25}'},
    ]
    answer = client.chat.completions.create(model=MODEL, max_tokens=8, messages=messages, tools=[TOOL])
    assert answer.usage.prompt_tokens > 50
    # A named function makes even random weights answer with a call, unless they wander off into an endless string or
    # white space; what they say as arguments is any JSON.
    for seed in range(12):
        forced = client.chat.completions.create(
            model=MODEL,
            max_tokens=80,
            seed=seed,
            messages=messages[:1],
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "gate_level"}},
        )
        if forced.choices[0].message.tool_calls:
            break
    call = forced.choices[0].message.tool_calls[0]
    assert call.function.name == "gate_level"
    json.loads(call.function.arguments)
    report("tools")


def responses():
    answer = client.responses.create(model=MODEL, input="Which gate is next?", max_output_tokens=8, store=False)
    assert answer.usage.input_tokens > 0
    with client.responses.stream(model=MODEL, input="And then?", max_output_tokens=8, store=False) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete"), kinds
    report("responses")


def errors():
    try:
        client.chat.completions.create(model="unknown", messages=[{"role": "user", "content": "?"}])
    except openai.NotFoundError as error:
        assert MODEL in str(error), error
    else:
        raise AssertionError("an unknown model was served")
    try:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "?"}], max_tokens=-1)
    except openai.BadRequestError as error:
        assert "max_tokens" in str(error), error
    else:
        raise AssertionError("the engine's 400 did not come through")
    report("errors")


def aborted():
    stream = client.chat.completions.create(
        model=MODEL,
        max_tokens=2000,
        messages=[{"role": "user", "content": "Count the drops."}],
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for _, _chunk in zip(range(3), stream):
        pass
    stream.close()
    report("aborted")


async def asynchronous():
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0, timeout=120) as aclient:

        async def one(n):
            stream = await aclient.chat.completions.create(
                model=MODEL, max_tokens=8, messages=[{"role": "user", "content": f"Gate {n}?"}], stream=True
            )
            return [chunk async for chunk in stream]

        answers = await asyncio.gather(*(one(n) for n in range(8)))
        assert all(a[-1].choices[0].finish_reason for a in answers)
    report("async", answers=len(answers))


def conversation():
    """Interleaved conversations behind the same system prompt: later turns find their prefix cached."""
    conversations = [[{"role": "system", "content": SYSTEM}] for _ in range(6)]
    before, followed, later = [0] * 6, 0, 0
    for turn in range(5):
        for n, messages in enumerate(conversations):
            messages.append({"role": "user", "content": f"Conversation {n}, turn {turn}: " + "what now? " * 60})
            answer = client.chat.completions.create(model=MODEL, max_tokens=16, messages=messages)
            if turn:
                # All of the prompt before, but for the block that was not full.
                later += 1
                followed += answer.usage.prompt_tokens_details.cached_tokens >= before[n] // 32 * 32 - 32
            before[n] = answer.usage.prompt_tokens
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
    report("conversation", followed=followed / later, turns=later)


if __name__ == "__main__":
    models()
    sync()
    streaming()
    tools()
    responses()
    errors()
    aborted()
    asyncio.run(asynchronous())
    conversation()
