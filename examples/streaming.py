"""Stream three completions at once with asyncio: ``python examples/streaming.py [MODEL]``."""

import asyncio
import sys

from enginewire import AsyncLLM, RequestOutputKind, SamplingParams


async def tell(llm: AsyncLLM, prompt: str) -> None:
    """Print pieces of a text as they come."""
    params = SamplingParams(max_tokens=32, seed=1, output_kind=RequestOutputKind.DELTA)
    async for output in llm.generate(prompt, params):
        print(f"{prompt[:12]}… {output.outputs[0].text!r}")


async def main() -> None:
    """Tell several stories side by side."""
    async with await AsyncLLM.create(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
        prompts = ["Once upon a time", "In a far-away galaxy", "It was a dark night"]
        await asyncio.gather(*[tell(llm, prompt) for prompt in prompts])


asyncio.run(main())
