"""Mixed: the default policy, and three that differ from it in one place each.

`Mixed` is two loops, `run` and `admit`, with three questions in them that another policy can
answer otherwise: who is preempted (`rank_victims`), who is asked next (`candidates`), and who may
pass one that was refused (`may_pass`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING

from nv_core.errors import ConfigError
from nv_core.policies.policy import take_or_preempt
from nv_core.sequence import Sequence, WaitReason
from nv_core.step import Step

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class MixedOptions(TypedDict, total=False):
        """What `Mixed` takes, and every policy that is built on it."""

        max_chunk_tokens: int | None
        max_partial_prompts: int | None
        whole_prompts: bool
        watermark: float
        cooldown_steps: int


WINDOW = 64
"""How many waiting sequences a policy looks at beyond those that could be admitted."""


class Mixed:
    """Decodes every running sequence, then fills the rest of the token budget with prompts.

    No prompt, however long, keeps a decoding sequence waiting: it is cut to the tokens that the
    decodes leave over. First come, first served: the first prompt that is refused closes the door,
    the youngest sequences make room for the oldest, and nobody is admitted in a step that had to
    preempt. Nobody starves.
    """

    def __init__(
        self,
        *,
        max_chunk_tokens: int | None = None,
        max_partial_prompts: int | None = None,
        whole_prompts: bool = True,
        watermark: float = 0.0,
        cooldown_steps: int = 0,
    ) -> None:
        """Sets the options; the defaults use all that is there.

        Args:
            max_chunk_tokens: Most tokens of one prompt in one step, for even steps; None for as
                many as the budget leaves.
            max_partial_prompts: Most prompts that may be cut at the same time; None for any number.
            whole_prompts: Whether a prompt is admitted only when all of it fits the free blocks, so
                that it need not be thrown out half-way. If not, its first chunk must fit.
            watermark: Share of the pool, in [0, 1), that admissions leave free for the decodes,
                while anything runs.
            cooldown_steps: For how many steps after one that had to preempt nobody is admitted,
                while anything runs, so that what was preempted is not admitted and preempted again.

        Raises:
            ConfigError: A value is out of range.
        """
        for name, value, least in (
            ("max_chunk_tokens", max_chunk_tokens, 1),
            ("max_partial_prompts", max_partial_prompts, 1),
            ("cooldown_steps", cooldown_steps, 0),
        ):
            if value is not None and (not isinstance(value, int) or value < least):
                raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
        if not 0 <= watermark < 1:
            raise ConfigError(f"watermark must be a share in [0, 1), got {watermark!r}")
        self.max_chunk_tokens = max_chunk_tokens
        self.max_partial_prompts = max_partial_prompts
        self.whole_prompts = whole_prompts
        self.watermark = watermark
        self.cooldown_steps = cooldown_steps
        self._last_cool_step = -1

    def schedule(self, step: Step) -> None:
        """Plans one step."""
        self.run(step)
        if step.preempted:
            self._last_cool_step = step.step_id + self.cooldown_steps
        elif step.step_id > self._last_cool_step or not step.has_grants:
            self.admit(step)

    def run(self, step: Step) -> None:
        """Decodes everybody, then goes on with the prompts that are cut."""
        running = step.decoding
        running += step.prefilling
        rest = deque(step.take_all(running) if self.max_chunk_tokens is None else running)
        victims: list[Sequence] | None = None
        while rest:
            if victims is None:
                victims = self.rank_victims(step, running)
            take_or_preempt(step, rest.popleft(), self.max_chunk_tokens, victims=victims)

    def admit(self, step: Step) -> None:
        """Admits prompts while there are slots, blocks and tokens left."""
        if step.slots <= 0 or step.budget <= 0:
            return
        keep_free = self.keep_free(step)
        for seq in self.candidates(step):
            if step.num_prefilling == self.max_partial_prompts:
                break
            reserve = len(seq.token_ids) if self.whole_prompts else 0
            granted = step.take(seq, self.max_chunk_tokens, reserve=reserve, keep_free=keep_free)
            if not granted and not self.may_pass(step, seq):
                break

    def keep_free(self, step: Step) -> int:
        """Blocks that an admission must leave free."""
        return ceil(self.watermark * step.num_blocks) if step.running else 0

    def rank_victims(self, step: Step, running: list[Sequence]) -> list[Sequence]:
        """Orders the running sequences, the one to preempt first last.

        Args:
            step: The step.
            running: The decoding ones, then those whose prompts are cut, the youngest last.
        """
        del step
        return list(running)

    def candidates(self, step: Step) -> Iterable[Sequence]:
        """Waiting sequences in the order in which they are asked."""
        first = step.waiting.first()
        if first is None:
            return
        yield first
        # Most steps under load end at the first: they need not pay for a copy of the others.
        window = min(step.slots, step.budget) + WINDOW
        yield from [seq for seq in islice(step.waiting, window) if seq is not first]

    def may_pass(self, step: Step, refused: Sequence) -> bool:
        """Whether sequences behind one that was refused may be asked."""
        del step
        return refused.wait_reason is WaitReason.SIBLING


class SkipAhead(Mixed):
    """`Mixed`, in which small prompts may pass one that does not fit, for a while."""

    def __init__(self, *, patience: int = 64, **options: Unpack[MixedOptions]) -> None:
        """Sets the options.

        Args:
            patience: A sequence that has waited for more steps than these is passed by nobody.
            options: See `Mixed`.
        """
        super().__init__(**options)
        self.patience = patience

    def may_pass(self, step: Step, refused: Sequence) -> bool:
        """Whether sequences behind one that was refused may be asked."""
        if refused.wait_reason is WaitReason.BLOCKS:
            return step.step_id - refused.arrival_step <= self.patience
        return super().may_pass(step, refused)


class LeastRecompute(Mixed):
    """`Mixed`, in which whoever loses least by it is preempted first."""

    def rank_victims(self, step: Step, running: list[Sequence]) -> list[Sequence]:
        """Orders the running sequences by what they would have to compute again."""
        return sorted(running, key=step.tokens_lost, reverse=True)
