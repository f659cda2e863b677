"""Serves several callers at once: answers stream side by side, and one caller gives up half way.

    python examples/async_streaming.py Qwen/Qwen3-0.6B

Each caller is an asyncio task, as the handlers of a web server are. Code like this, written for
vLLM's `AsyncLLM`, runs after changing the import.
"""

import asyncio
import sys

from nv_runtime import AsyncLLM, RequestOutputKind, SamplingParams

QUESTIONS = {
    "ada": "Name three rivers in Europe.",
    "bob": "Count to ten, in words.",
    "eve": "Tell me a very long story.",
}
PATIENCE = 8
"""How many pieces of her story Eve listens to."""


async def listen(llm: AsyncLLM, name: str, question: str) -> None:
    """Asks one question and prints each piece of the answer as it comes."""
    params = SamplingParams(
        temperature=0.7, seed=1, max_tokens=48, output_kind=RequestOutputKind.DELTA
    )
    messages = [{"role": "user", "content": question}]
    answer = llm.chat(
        messages, params, request_id=name, chat_template_kwargs={"enable_thinking": False}
    )
    num_pieces = 0
    async for output in answer:
        print(f"{name}: {output.outputs[0].text!r}")
        num_pieces += 1
        if output.finished and output.metrics is not None:
            waited = output.metrics.time_to_first_token
            print(f"{name} has heard it all; the first token came after {waited:.3f} s")
        if name == "eve" and num_pieces == PATIENCE:
            # Closing the generator, or cancelling the task, aborts the request.
            await answer.aclose()
            print("eve has left")


async def main() -> None:
    """Loads the model and serves everybody at the same time."""
    model = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B"
    async with AsyncLLM(model, max_model_len="auto") as llm:
        await asyncio.gather(*(listen(llm, name, text) for name, text in QUESTIONS.items()))


if __name__ == "__main__":
    asyncio.run(main())
