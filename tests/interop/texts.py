"""Greedy texts, one request at a time with nothing cached: what must be equal whoever serves them."""

from __future__ import annotations

from typing import TypeAlias

import httpx
import openai

Texts: TypeAlias = dict[str, tuple[str, str, int, int]]
"""By prompt: text, finish reason, tokens of the prompt, tokens of the text."""

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was",
    "def fibonacci(n):",
    "Zürich – “naïve” 你好 🙂",
]
QUESTIONS = ["What is the capital of France?", "Write one sentence about the sea."]


def sdk(url: str) -> openai.OpenAI:
    """Make the official client, which does not try again by itself."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def greedy_texts(url: str, model: str) -> Texts:
    """Ask a server for the texts."""
    found: Texts = {}
    with sdk(url) as client:
        for prompt in PROMPTS:
            httpx.post(f"{url}/reset_prefix_cache", timeout=30).raise_for_status()
            completion = client.completions.create(model=model, prompt=prompt, max_tokens=48, temperature=0)
            choice, usage = completion.choices[0], completion.usage
            assert usage is not None
            found[prompt] = (choice.text, choice.finish_reason, usage.prompt_tokens, usage.completion_tokens)
        for question in QUESTIONS:
            httpx.post(f"{url}/reset_prefix_cache", timeout=30).raise_for_status()
            answer = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": question}], max_tokens=48, temperature=0
            )
            reply, usage = answer.choices[0], answer.usage
            assert usage is not None
            assert reply.message.content is not None
            found[question] = (
                reply.message.content,
                reply.finish_reason,
                usage.prompt_tokens,
                usage.completion_tokens,
            )
    return found
