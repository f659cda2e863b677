"""Works on token ids alone: no tokenizer in the engine, no text in or out.

    python examples/token_ids.py Qwen/Qwen3-0.6B

For programs that tokenize themselves, and for benchmarks that want prompts of exact lengths. A
plain list of ids is a prompt as well. The second prompt starts like the first, which shows the
prefix cache.
"""

import sys

from nv_runtime import LLM, SamplingParams, TokensPrompt


def main() -> None:
    """Runs two prompts that share their beginning, one after the other."""
    model = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B"
    shared = list(range(100, 612))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(model, skip_tokenizer_init=True, max_model_len="auto") as llm:
        for ending in ([7, 8], [9, 10, 11]):
            prompt: TokensPrompt = {"prompt_token_ids": [*shared, *ending]}
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            answer = output.outputs[0]
            print(
                f"{len(output.prompt_token_ids)} prompt tokens, {output.num_cached_tokens} of them "
                f"from the prefix cache -> {list(answer.token_ids)}"
            )


if __name__ == "__main__":
    main()
