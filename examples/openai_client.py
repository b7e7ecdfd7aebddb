"""The official OpenAI client against ``enginewire serve``: chat, streaming, several answers, structured output.

enginewire serve
python examples/openai_client.py [http://127.0.0.1:8000]
"""

from __future__ import annotations

import json
import sys

from openai import APIStatusError, OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="not needed")
model = client.models.list().data[0].id

# A chat.
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    max_completion_tokens=32,
    temperature=0,
)
print("chat:", answer.choices[0].message.content)

# The same, as it is written. The last event has no text, but the usage.
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Count to five."}],
    max_completion_tokens=32,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
print("stream: ", end="")
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f" ({chunk.usage.completion_tokens} tokens)")

# Two sampled continuations; each seed is used as it is and counted up for the next.
completion = client.completions.create(
    model=model, prompt="Once upon a time", max_tokens=12, n=2, temperature=0.8, seed=1, stop=["\n"]
)
for continuation in completion.choices:
    print("sampled:", repr(continuation.text))

# JSON that follows a schema, if the engine can do that.
schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
try:
    structured = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Invent a person."}],
        max_completion_tokens=64,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    )
    print("structured:", json.loads(structured.choices[0].message.content or ""))
except APIStatusError as error:
    print("structured:", error.message)
