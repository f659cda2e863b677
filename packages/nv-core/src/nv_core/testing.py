"""KVOracle: runs step plans on a pretend device, and notices every misplaced block.

For whoever changes a scheduler, a policy or a runner. The oracle stands where the model runner
stands: it sees plans and nothing else of the scheduler. Its model is as small as a model can be
that still depends on its whole KV cache: two layers, without weights. The first stores each
token at its position; the second folds the first layer over all positions up to its own, so
that it stands for the content of the prefix; the sampled token folds the second layer. All of
it is read back from the slots, through the block table of the plan. A block that is stale,
shared too early, reused too early or misplaced is therefore found as an error that names
sequence, position and slot, and (`strict=False`) as a wrong token.

`reference_tokens` runs the same model alone, with unlimited memory: what every request must get
whatever ran beside it. `run_until_idle` is the loop around a scheduler and an oracle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from nv_core.errors import NvError, RequestError, SchedulingError
from nv_core.plan import ScheduledSequence, StepPlan
from nv_core.scheduler import Scheduler

DEFAULT_VOCAB_SIZE = 32_000

_FOLD_START = 0x243F6A8885A308D3
_FOLD_MULTIPLIER = 0x9E3779B97F4A7C15
_FOLD_MASK = 2**64 - 1


def _fold(state: int, value: int) -> int:
    """Absorbs a value into a 64-bit state; one-to-one in each of the two."""
    state = ((state ^ (value + 1)) * _FOLD_MULTIPLIER) & _FOLD_MASK
    return state ^ (state >> 32)


class KVMismatchError(NvError, AssertionError):
    """A plan made the oracle read something else than the sequence's own past."""


class _Slot:
    """What one slot of the KV cache holds.

    Attributes:
        token_id: First layer: the token.
        position: First layer: its position.
        prefix: Second layer: stands for all tokens up to this one.
        generation: See `KVOracle.retire_contents`.
        seq_id: The sequence that wrote it; for messages.
        step_id: The step that wrote it; for messages.
    """

    __slots__ = ("generation", "position", "prefix", "seq_id", "step_id", "token_id")

    def __init__(
        self, token_id: int, position: int, *, generation: int, seq_id: int, step_id: int
    ) -> None:
        self.token_id = token_id
        self.position = position
        self.prefix = 0
        self.generation = generation
        self.seq_id = seq_id
        self.step_id = step_id

    def __str__(self) -> str:
        return (
            f"position {self.position} (token {self.token_id}) of sequence {self.seq_id}, "
            f"written in step {self.step_id}"
        )


class _Row:
    """Device state of one resident sequence, as a runner keeps it.

    Attributes:
        num_tokens: Tokens in the cache: computed, or found there when it was admitted.
        prefixes: What the second layer held at each of their positions when last read.
        sampled_token_id: The token that its last step yielded; None if that yielded none.
        generation: See `KVOracle.retire_contents`.
    """

    __slots__ = ("generation", "num_tokens", "prefixes", "sampled_token_id")

    def __init__(self, num_tokens: int, generation: int) -> None:
        self.num_tokens = num_tokens
        self.prefixes: list[int] = []
        self.sampled_token_id: int | None = None
        self.generation = generation


class KVOracle:
    """A pool of slots that remember what they hold, and a model that reads all of it.

    Plans must be executed once each, in the order in which they were made; later plans may have
    been made before. The oracle remembers one number for each token of each resident sequence.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        vocab_size: int = DEFAULT_VOCAB_SIZE,
        strict: bool = True,
    ) -> None:
        """Makes a pool in which nothing was ever written.

        Args:
            num_blocks: Size of the pool, as in `SchedulerConfig`.
            block_size: Tokens per block, as in `SchedulerConfig`.
            vocab_size: Sampled tokens are in [0, vocab_size). A small one makes accidental stops
                likely, and accidentally right tokens too.
            strict: Whether a mismatch raises. If false it only changes the tokens, as it would
                with a model.
        """
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._strict = strict
        self._slots: list[_Slot | None] = [None] * (num_blocks * block_size)
        self._rows: dict[int, _Row] = {}
        self._generation = 0

    def execute(self, plan: StepPlan) -> dict[int, int]:
        """Runs one step: writes its slots, then reads every slot that its sequences can see.

        Args:
            plan: The next plan in order.

        Returns:
            The sampled token of each entry whose `samples` is true, by `seq_id`: what
            `Scheduler.commit` wants.

        Raises:
            KVMismatchError: A sequence would read or overwrite what is not its own; only if
                `strict`. What the step had written by then stays written.
        """
        for seq_id in plan.released:
            self._rows.pop(seq_id, None)
        batch = [(entry, self._enter(entry), self._slot_ids(entry)) for entry in plan.sequences]
        # Layer by layer over the whole batch, as a model works: an entry may read what another
        # one writes in the same layer of the same step.
        for entry, row, slot_ids in batch:
            self._write_tokens(plan.step_id, entry, row, slot_ids)
        for entry, _row, slot_ids in batch:
            self._write_prefixes(entry, slot_ids)
        sampled = {}
        for entry, row, slot_ids in batch:
            token_id = self._read(entry, row, slot_ids)
            row.sampled_token_id = token_id if entry.samples else None
            if entry.samples:
                sampled[entry.seq_id] = token_id
        return sampled

    def retire_contents(self) -> None:
        """Declares what is in the pool unfit for sequences that are admitted from now on.

        The counterpart of `Scheduler.reset_prefix_cache`, for which a change of weights is the
        usual reason. Resident sequences go on with what they have, and what they still compute
        is unfit for others too. Call it when all plans made so far have been executed.
        """
        self._generation += 1

    def _enter(self, entry: ScheduledSequence) -> _Row:
        row = self._rows.get(entry.seq_id)
        if row is None:
            row = _Row(entry.num_computed_tokens, self._generation)
            self._rows[entry.seq_id] = row
        elif row.num_tokens != entry.num_computed_tokens:
            self._report(
                f"sequence {entry.seq_id}: the plan starts at position "
                f"{entry.num_computed_tokens}, expected {row.num_tokens}, the number of tokens "
                "computed before"
            )
        return row

    def _slot_ids(self, entry: ScheduledSequence) -> list[int]:
        """Slots of all positions up to the end of the step, through the block table."""
        if entry.num_scheduled_tokens < 1:
            raise KVMismatchError(f"sequence {entry.seq_id}: the plan computes no token of it")
        size = self._block_size
        length = entry.num_computed_tokens + entry.num_scheduled_tokens
        table = entry.block_table
        if length > len(table) * size:
            raise KVMismatchError(
                f"sequence {entry.seq_id}: position {length - 1} needs block "
                f"{(length - 1) // size} of its table, which has {len(table)}"
            )
        for block_id in table:
            if not 0 <= block_id < self._num_blocks:
                raise KVMismatchError(
                    f"sequence {entry.seq_id}: block id {block_id} is not in "
                    f"[0, {self._num_blocks})"
                )
        return [table[i // size] * size + i % size for i in range(length)]

    def _tokens(self, entry: ScheduledSequence, row: _Row) -> list[int]:
        """The step's tokens; one that only the device knows comes from the row."""
        tokens = list(entry.token_ids)
        missing = entry.num_scheduled_tokens - len(tokens)
        if missing == 1 and row.sampled_token_id is not None:
            tokens.append(row.sampled_token_id)
        elif missing:
            raise KVMismatchError(
                f"sequence {entry.seq_id}: the plan computes {entry.num_scheduled_tokens} tokens "
                f"from position {entry.num_computed_tokens} on, but holds {len(tokens)}; the "
                f"step before sampled {0 if row.sampled_token_id is None else 1}"
            )
        return tokens

    def _write_tokens(
        self, step_id: int, entry: ScheduledSequence, row: _Row, slot_ids: list[int]
    ) -> None:
        start = entry.num_computed_tokens
        for position, token_id in enumerate(self._tokens(entry, row), start=start):
            self._slots[slot_ids[position]] = _Slot(
                token_id,
                position,
                generation=row.generation,
                seq_id=entry.seq_id,
                step_id=step_id,
            )

    def _write_prefixes(self, entry: ScheduledSequence, slot_ids: list[int]) -> None:
        prefix = _FOLD_START
        for position, slot_id in enumerate(slot_ids):
            slot = self._slots[slot_id]
            if slot is not None:
                prefix = _fold(prefix, slot.token_id)
                if position >= entry.num_computed_tokens:
                    slot.prefix = prefix

    def _read(self, entry: ScheduledSequence, row: _Row, slot_ids: list[int]) -> int:
        """Reads all slots, checks that they hold the sequence's own past, samples a token."""
        prefix = state = _FOLD_START
        for position, slot_id in enumerate(slot_ids):
            slot = self._slots[slot_id]
            if slot is None:
                self._report_slot(entry, position, slot_id, "was never written")
                continue
            prefix = _fold(prefix, slot.token_id)
            state = _fold(state, slot.prefix)
            is_known = position < len(row.prefixes)
            if is_known and slot.prefix != row.prefixes[position]:
                self._report_slot(entry, position, slot_id, f"holds {slot}")
            elif slot.position != position or slot.prefix != prefix:
                self._report_slot(entry, position, slot_id, f"holds {slot}, of another prefix")
            elif position >= entry.num_computed_tokens and slot.seq_id != entry.seq_id:
                self._report_slot(entry, position, slot_id, f"was overwritten with {slot}")
            elif slot.generation < row.generation:
                self._report_slot(entry, position, slot_id, f"holds {slot}, which was retired")
            if not is_known:
                row.prefixes.append(prefix)
        row.num_tokens = len(slot_ids)
        return state % self._vocab_size

    def _report_slot(
        self, entry: ScheduledSequence, position: int, slot_id: int, found: str
    ) -> None:
        if not self._strict:
            return
        block_id, offset = divmod(slot_id, self._block_size)
        self._report(
            f"sequence {entry.seq_id}, position {position}: slot {slot_id} (block {block_id}, "
            f"offset {offset}) {found}; expected position {position} of its own prefix "
            f"(it computes positions {entry.num_computed_tokens} to "
            f"{entry.num_computed_tokens + entry.num_scheduled_tokens - 1})"
        )

    def _report(self, problem: str) -> None:
        if self._strict:
            raise KVMismatchError(problem)


def reference_tokens(
    prompt_token_ids: Iterable[int],
    max_tokens: int,
    *,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    stop_token_ids: Collection[int] = (),
    min_tokens: int = 0,
) -> list[int]:
    """Runs the oracle's model on one prompt alone, with unlimited memory.

    Args:
        prompt_token_ids: The prompt.
        max_tokens: Most tokens to generate; where a model length or the pool ends the request
            earlier, pass that smaller number.
        vocab_size: As given to the oracle.
        stop_token_ids: Tokens that end the request, end-of-sequence tokens included.
        min_tokens: Number of tokens before which none of those ends it.

    Returns:
        The output tokens, the stop token included.

    Raises:
        RequestError: The prompt is empty.
    """
    pending = list(prompt_token_ids)
    if not pending:
        raise RequestError("prompt_token_ids is empty; a prompt needs at least one token")
    prefix = state = _FOLD_START
    output: list[int] = []
    while True:
        for token_id in pending:
            prefix = _fold(prefix, token_id)
            state = _fold(state, prefix)
        sampled = state % vocab_size
        output.append(sampled)
        stops = sampled in stop_token_ids and len(output) > min_tokens
        if stops or len(output) >= max_tokens:
            return output
        pending = [sampled]


def run_until_idle(
    scheduler: Scheduler, oracle: KVOracle, *, depth: int = 1, max_steps: int = 10_000
) -> list[StepPlan]:
    """Runs everything that a scheduler holds, and checks its invariants after each step.

    Args:
        scheduler: The scheduler, no plan in flight.
        oracle: The oracle that has executed all its plans so far.
        depth: Most plans in flight: 1 commits each plan before the next is made, 2 runs one
            step ahead of the device.
        max_steps: Most plans to make.

    Returns:
        The plans, in order.

    Raises:
        KVMismatchError: A plan is wrong.
        SchedulingError: The scheduler stalls, breaks an invariant, or is not done in `max_steps`
            plans.
    """
    plans: list[StepPlan] = []
    in_flight: deque[StepPlan] = deque()
    while scheduler.has_unfinished or in_flight:
        plan = scheduler.schedule() if len(in_flight) < depth else None
        if plan is not None:
            plans.append(plan)
            in_flight.append(plan)
            if len(plans) > max_steps:
                raise SchedulingError(f"the scheduler is not idle after {max_steps} steps")
        elif in_flight:
            oldest = in_flight.popleft()
            scheduler.commit(oldest, oracle.execute(oldest))
        scheduler.check_invariants()
    return plans
