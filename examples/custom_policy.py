"""A scheduling policy of one's own, run without a model and compared with the default.

    python examples/custom_policy.py

Needs nv-core alone: no GPU, no torch. The very same object drives the engine:

    LLM("Qwen/Qwen3-0.6B", scheduling_policy=ShortestFirst())
"""

from nv_core import (
    Mixed,
    Policy,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    Sequence,
    Step,
)

PROMPT_LENGTHS = {"report": 44, "question": 5, "letter": 20, "greeting": 3}


class ShortestFirst(Mixed):
    """Decodes everybody, then admits the prompt with the least to compute.

    Each step of waiting counts as `ageing` tokens less, so that a stream of short prompts cannot
    keep a long one waiting for ever.
    """

    def __init__(self, ageing: int = 2) -> None:
        """Sets how fast a request gains on those that arrive later.

        Args:
            ageing: Tokens that one step of waiting is worth; 0 serves the shortest, always.
        """
        super().__init__()
        self.ageing = ageing

    def candidates(self, step: Step) -> list[Sequence]:
        """Waiting sequences in the order in which they are asked."""

        def cost(seq: Sequence) -> int:
            num_steps_waited = step.step_id - seq.arrival_step
            return step.uncached_tokens(seq) - self.ageing * num_steps_waited

        return sorted(step.waiting, key=cost)


def draw(policy: str | Policy) -> None:
    """Runs all prompts under a policy and prints what each got in each step."""
    scheduler = Scheduler(
        SchedulerConfig(num_blocks=32, block_size=4, max_num_batched_tokens=12, policy=policy)
    )
    sequences = [
        scheduler.add([letter] * length, SamplingParams(max_tokens=4), request_id=name)
        for letter, (name, length) in enumerate(PROMPT_LENGTHS.items())
    ]
    rows = {seq.seq_id: "" for seq in sequences}
    while plan := scheduler.schedule():
        granted = {entry.seq_id: entry.num_scheduled_tokens for entry in plan.sequences}
        for seq in sequences:
            idle = "" if seq.is_finished else "."
            rows[seq.seq_id] += f"{granted.get(seq.seq_id, idle):>4}"
        # A real model would sample here; the schedule depends on the numbers of tokens only.
        scheduler.commit(plan, {e.seq_id: 7 for e in plan.sequences if e.samples})
    print(policy if isinstance(policy, str) else type(policy).__name__)
    for seq in sequences:
        print(f"  {seq.request_id:<9}{rows[seq.seq_id]}")


def main() -> None:
    """Draws the default policy and the one above."""
    print("tokens computed in each step; '.' waits, 1 decodes\n")
    draw("mixed")
    print()
    draw(ShortestFirst())


if __name__ == "__main__":
    main()
