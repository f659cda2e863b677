"""DeviceBatch: one row of device state for each resident sequence.

A row holds what a decode step needs: the last token, the length, how to sample, and the block
table; `nv_runtime.sampling_tables` holds what few requests need besides. Decode steps read and
advance rows on the device; the host sends only what it alone knows (a new sequence, a new block),
as (place, value) pairs in one packed buffer. A steady decode step sends nothing.

Everything lies in one int32 arena, so that one upload can change anything:

    [ row 0 | row 1 | ... | padding row | batch: the rows that take part, in order ]

The host keeps just enough of a mirror to know what to send. What the device computed by itself (a
sampled token, an advanced length) is never read back here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nv_core import CapacityError, SamplingParams, ScheduledBatch, ScheduledSequence, StepPlan
from nv_core.config import MAX_COUNT
from nv_kernels import StateColumns
from nv_runtime.sampling_needs import (
    PLAIN,
    RowNeeds,
    SamplingNeeds,
    effective_temperature,
    needs_of,
)
from nv_runtime.sampling_tables import SamplingTables

# Columns of a row. Seeds are 64 bits, low half first, and stand at an even column. Penalties are
# three columns: of repetition, of frequency and of presence.
TOKEN, LENGTH, TEMPERATURE, IS_ACTIVE, SEED = 0, 1, 2, 3, 4
TOP_K, TOP_P, MIN_P, PENALTIES = 6, 7, 8, 9
FIRST_BLOCK = 12
COLUMNS = StateColumns(TOKEN, LENGTH, IS_ACTIVE, FIRST_BLOCK)

_LARGEST_FLOAT32 = 3.4028234663852886e38
_NUM_STAGING_BUFFERS = 4
"""More than there are steps in flight, so that a buffer is never rewritten while it is copied."""


_PLAIN_ROW = RowNeeds(PLAIN, PLAIN, 0)


@dataclass(slots=True)
class _Row:
    """What the host knows of a row on the device.

    Attributes:
        length: The row's length, as decode steps will read it.
        token_position: Position in the sequence of the row's token.
        needs: What sampling its tokens needs.
    """

    length: int = -1
    token_position: int = -1
    needs: RowNeeds = _PLAIN_ROW


class DeviceBatch:
    """The rows of all resident sequences, and the rows of the current batch.

    Attributes:
        rows: Each sequence's state, [max_num_seqs + 1, FIRST_BLOCK + max_blocks] int32; the last
            row is padding: inactive, of length 0.
        batch: Row numbers of the sequences in the current batch, [max_batch] int32; places behind
            them name the padding row.
        padding_row: Number of the padding row.
        tables: What sampling remembers beside the rows.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_batch: int,
        max_blocks: int,
        vocab_size: int,
        device: torch.device,
        seed_of: Callable[[ScheduledSequence], int],
    ) -> None:
        """Allocates rows for every sequence that can be resident; all are free.

        Args:
            max_num_seqs: Most resident sequences.
            max_batch: Longest batch, padding included.
            max_blocks: Longest block table.
            vocab_size: Number of token ids.
            device: Where the arena lies.
            seed_of: Gives the key of a sequence's draws, any 64-bit integer.

        Raises:
            CapacityError: The device cannot allocate that much, or 32 bits cannot address it.
        """
        width = FIRST_BLOCK + max_blocks + max_blocks % 2
        self.padding_row = max_num_seqs
        num_values = (max_num_seqs + 1) * width
        self._arena = _allocate(num_values + max_batch, device, max_num_seqs)
        self.rows = self._arena[:num_values].view(max_num_seqs + 1, width)
        self.batch = self._arena[num_values:]
        self.batch.fill_(self.padding_row)
        self.tables = SamplingTables(
            num_rows=max_num_seqs + 1, vocab_size=vocab_size, device=device
        )
        self._vocab_size = vocab_size
        self._width = width
        self._batch_start = num_values
        self._seed_of = seed_of
        self._staging = _StagingBuffers(device)
        self._sent_batch: list[int] = []
        self._row_of: dict[int, int] = {}
        # Lengths of the block tables that were sent, by `seq_id`.
        self._num_blocks: dict[int, int] = {}
        # Sequences whose sampling needs more than a temperature.
        self._special: set[int] = set()
        self._known: list[_Row] = []
        self._free_rows: list[int] = []
        self.forget()

    def forget(self) -> None:
        """Forgets what the device has: after a failure nobody knows how much of it arrived.

        Every sequence gets a new row, and everything is sent anew, with the next plan that brings
        it; its tokens must all be known to the host by then.
        """
        self._sent_batch = [-1] * self.batch.shape[0]
        self._row_of = {}
        self._num_blocks = {}
        self._special = set()
        self._known = [_Row() for _ in range(self.padding_row)]
        self._free_rows = list(range(self.padding_row - 1, -1, -1))

    def row_of(self, seq_id: int) -> int:
        """Returns the row of a resident sequence that a plan has brought."""
        return self._row_of[seq_id]

    def needs_of(self, entries: Iterable[ScheduledSequence]) -> SamplingNeeds:
        """All that sampling the next tokens of these sequences needs."""
        needs = PLAIN
        # Mostly there are none, and then a step looks at no row.
        if self._special:
            for entry in entries:
                if entry.seq_id in self._special:
                    row_needs = self._known[self._row_of[entry.seq_id]].needs
                    needs |= row_needs.at(entry.num_computed_tokens + entry.num_scheduled_tokens)
        return needs

    def follow(self, plan: StepPlan) -> list[tuple[int, int]]:
        """Brings the rows in line with a plan: leavers out, newcomers in, new blocks appended.

        Args:
            plan: The next plan to run.

        Returns:
            What `send` has to write, as (place in the arena, value) pairs.
        """
        for seq_id in plan.released:
            row = self._row_of.pop(seq_id, None)
            if row is not None:
                self._free_rows.append(row)
                del self._num_blocks[seq_id]
                self._special.discard(seq_id)
        changes: list[tuple[int, int]] = []
        batch = plan.sequences
        for index, (seq_id, num_blocks) in enumerate(
            zip(batch.seq_ids, batch.num_blocks, strict=True)
        ):
            num_sent = self._num_blocks.get(seq_id, 0)
            if num_blocks == num_sent:
                continue
            row = self._row_of.get(seq_id)
            if row is None:
                row = self._row_of[seq_id] = self._free_rows.pop()
                self._known[row] = _Row()
                changes += self._new_row(row, batch[index])
            place = row * self._width + FIRST_BLOCK + num_sent
            changes += enumerate(batch.growing_tables[index][num_sent:num_blocks], start=place)
            self._num_blocks[seq_id] = num_blocks
        return changes

    def prepare_decode(
        self, batch: ScheduledBatch, order: Sequence[int], *, padded_size: int
    ) -> list[tuple[int, int]]:
        """Names the batch of a decode step, and corrects rows whose last step was no decode step.

        Args:
            batch: The batch; each sequence computes one token and samples the next.
            order: Places in `batch`, in the order in which the step shall have them.
            padded_size: Length of the batch with padding.

        Returns:
            What `send` has to write.
        """
        changes: list[tuple[int, int]] = []
        rows = [self._row_of[batch.seq_ids[place]] for place in order]
        for row, place in zip(rows, order, strict=True):
            known = self._known[row]
            length = batch.num_computed_tokens[place]
            if known.length != length:
                changes.append((row * self._width + LENGTH, length))
            if known.token_position != length:
                changes.append((row * self._width + TOKEN, batch[place].token_ids[0]))
            # The step itself advances the row.
            known.length = known.token_position = length + 1
        rows += [self.padding_row] * (padded_size - len(rows))
        sent = self._sent_batch
        if sent[:padded_size] != rows:
            changes += (
                (self._batch_start + index, row)
                for index, row in enumerate(rows)
                if sent[index] != row
            )
            sent[:padded_size] = rows
        return changes

    def note_sampled(self, entry: ScheduledSequence) -> None:
        """Notes that a step other than a decode step stores the entry's next token in its row."""
        known = self._known[self._row_of[entry.seq_id]]
        known.token_position = entry.num_computed_tokens + entry.num_scheduled_tokens

    def send(self, changes: Sequence[tuple[int, int]]) -> None:
        """Writes changes to the device in stream order, in one upload; nothing for none."""
        if changes:
            count = len(changes)
            flat = [place for place, _ in changes] + [value for _, value in changes]
            packed = self._staging.upload(flat)
            self._arena.index_copy_(0, packed[:count].long(), packed[count:])

    def _new_row(self, row: int, entry: ScheduledSequence) -> list[tuple[int, int]]:
        seq = entry.sequence
        params = seq.sampling_params
        needs = needs_of(seq, self._vocab_size)
        if needs.early != PLAIN or needs.late != PLAIN:
            self._known[row].needs = needs
            self._special.add(entry.seq_id)
        self.tables.fill(row, seq, needs.early | needs.late)
        seed = self._seed_of(entry) % 2**64
        columns = {
            TEMPERATURE: _bits(effective_temperature(params)),
            IS_ACTIVE: 1,
            SEED: _signed_32(seed % 2**32),
            SEED + 1: _signed_32(seed >> 32),
            # Any top-k that is no smaller than the vocabulary keeps all.
            TOP_K: min(params.top_k, self._vocab_size),
            TOP_P: _bits(params.top_p),
            MIN_P: _bits(params.min_p),
            **{PENALTIES + i: _bits(value) for i, value in enumerate(_penalties(params))},
        }
        return [(row * self._width + column, value) for column, value in columns.items()]


def _allocate(num_values: int, device: torch.device, max_num_seqs: int) -> Tensor:
    advice = "lower max_num_seqs or max_model_len, or raise block_size"
    # Changes are sent with their places, as int32 too.
    if num_values > MAX_COUNT:
        raise CapacityError(
            f"max_num_seqs={max_num_seqs} rows of state have {num_values} values, more than the "
            f"{MAX_COUNT} that can be addressed; {advice}"
        )
    try:
        return torch.zeros(num_values, dtype=torch.int32, device=device)
    except RuntimeError as error:
        raise CapacityError(
            f"the device cannot allocate max_num_seqs={max_num_seqs} rows of state, "
            f"{4 * num_values} bytes; {advice}"
        ) from error


class _StagingBuffers:
    """Pinned host buffers, used in turn, through which lists reach the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.int32)] * _NUM_STAGING_BUFFERS
        self._next = 0

    def upload(self, values: list[int]) -> Tensor:
        if self._device.type != "cuda":
            return torch.tensor(values, dtype=torch.int32)
        turn = self._next
        self._next = (turn + 1) % _NUM_STAGING_BUFFERS
        if self._buffers[turn].numel() < len(values):
            size = max(1024, 2 * len(values))
            self._buffers[turn] = torch.empty(size, dtype=torch.int32, pin_memory=True)
        staged = self._buffers[turn][: len(values)]
        staged.copy_(torch.tensor(values, dtype=torch.int32))
        return staged.to(self._device, non_blocking=True)


def _penalties(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty


def _bits(value: float) -> int:
    """The bits of the float32 that is nearest to a finite value, as an int32."""
    clamped = max(-_LARGEST_FLOAT32, min(value, _LARGEST_FLOAT32))
    return int(struct.unpack("<i", struct.pack("<f", clamped))[0])


def _signed_32(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value
