"""What a benchmark asks for: prompts of random tokens and answers of fixed lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass

from nv_core import ConfigError, SamplingParams

__all__ = ["Workload", "random_workload"]


@dataclass(frozen=True)
class Workload:
    """Requests that are all there at the start.

    Args:
        prompts: Token ids of each prompt.
        sampling_params: Parameters of each request; answers have exactly `max_tokens` tokens.
        num_shared_tokens: Tokens that all prompts begin with.
    """

    prompts: list[list[int]]
    sampling_params: list[SamplingParams]
    num_shared_tokens: int = 0

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(prompt tokens, output tokens) of each request."""
        return [
            (len(prompt), int(params.max_tokens or 0))
            for prompt, params in zip(self.prompts, self.sampling_params, strict=True)
        ]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(num_prompt for num_prompt, _ in self.lengths)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(num_output for _, num_output in self.lengths)


def random_workload(
    num_prompts: int,
    *,
    input_len: int,
    output_len: int,
    vocab_size: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    temperature: float = 1.0,
    generator: random.Random,
) -> Workload:
    """Draws requests like vLLM's dataset `random`.

    Args:
        num_prompts: How many.
        input_len: Mean prompt tokens behind the common prefix.
        output_len: Mean output tokens.
        vocab_size: Token ids are below this.
        range_ratio: Lengths are uniform in [mean * (1 - ratio), mean * (1 + ratio)].
        prefix_len: Tokens that all prompts begin with.
        temperature: Of all requests.
        generator: Source of all draws.

    Raises:
        ConfigError: A number is out of range.
    """
    for name, value in (
        ("num_prompts", num_prompts),
        ("input_len", input_len),
        ("output_len", output_len),
    ):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"random_range_ratio must be in [0, 1), got {range_ratio}")
    if prefix_len < 0:
        raise ConfigError(f"random_prefix_len must be at least 0, got {prefix_len}")

    def draw_length(mean: int) -> int:
        shortest = max(int(mean * (1 - range_ratio)), 1)
        return generator.randint(shortest, max(int(mean * (1 + range_ratio)), shortest))

    def draw_tokens(count: int) -> list[int]:
        return [generator.randrange(vocab_size) for _ in range(count)]

    prefix = draw_tokens(prefix_len)
    prompts = [prefix + draw_tokens(draw_length(input_len)) for _ in range(num_prompts)]
    params = [
        SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=draw_length(output_len))
        for _ in range(num_prompts)
    ]
    return Workload(prompts, params, prefix_len)
