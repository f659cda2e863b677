"""Answers two conversations in one batch.

    python examples/offline_chat.py Qwen/Qwen3-0.6B

The model is a directory, a .gguf file or a Hub id. Code like this, written for vLLM, runs after
changing `from vllm import ...` to `from nv_runtime import ...`.
"""

import sys

from nv_runtime import LLM, SamplingParams

CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
]


def main() -> None:
    """Loads the model, chats and prints the answers."""
    model = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B"
    with LLM(model, max_model_len="auto") as llm:
        outputs = llm.chat(
            CONVERSATIONS,
            SamplingParams(temperature=0.0, max_tokens=64),
            # A variable of Qwen3's chat template; templates that do not know it ignore it.
            chat_template_kwargs={"enable_thinking": False},
        )
    for conversation, output in zip(CONVERSATIONS, outputs, strict=True):
        answer = output.outputs[0]
        print(f"\n> {conversation[-1]['content']}")
        print(answer.text)
        print(
            f"  [{len(output.prompt_token_ids)} prompt tokens, {len(answer.token_ids)} tokens, "
            f"finish_reason={answer.finish_reason}]"
        )


if __name__ == "__main__":
    main()
