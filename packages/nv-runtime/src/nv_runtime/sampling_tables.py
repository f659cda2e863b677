"""SamplingTables: what sampling must remember of a request, on the device, beside its row.

Each table has one row for every row of `DeviceBatch`, and is made when the first request needs it:

    token_counts  [rows, vocab_size] int32         2 * count in the output + 1 if in the prompt
    logit_bias    [rows, vocab_size] fp32
    allowed_mask  [rows, vocab_size / 32] int32    a bit per token
    banned        [rows, words, length + 1] int32  runs of tokens, aligned to the right behind -1,
                                                   and the position until which each is banned
    recent        [rows, length - 1] int32         the newest output tokens; -1 before the first

The host writes a row when a sequence gets it. After that only the device writes: a step notes each
token that it samples in `token_counts` and `recent` by itself, so that the next step can be
launched before the host has seen it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nv_core import Sequence
from nv_runtime.sampling_needs import BannedWord, SamplingNeeds, banned_words_of
from nv_runtime.transfer import to_device

_SMALLEST_WORDS = 8


class SamplingTables:
    """The tables; None until they are needed.

    Attributes:
        token_counts: See the file.
        logit_bias: See the file.
        allowed_mask: See the file.
        banned: See the file.
        recent: See the file.
    """

    def __init__(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Makes nothing yet.

        Args:
            num_rows: Rows of the device batch, padding included.
            vocab_size: Number of token ids.
            device: Where the tables will lie.
        """
        self._num_rows = num_rows
        self._vocab_size = vocab_size
        self._device = device
        self.token_counts: Tensor | None = None
        self.logit_bias: Tensor | None = None
        self.allowed_mask: Tensor | None = None
        self.banned: Tensor | None = None
        self.recent: Tensor | None = None

    @property
    def banned_shape(self) -> tuple[int, ...]:
        """Shape of `banned`, which a wider one may replace; () while there is none."""
        return () if self.banned is None else tuple(self.banned.shape)

    @torch.inference_mode()
    def make(self, needs: SamplingNeeds) -> None:
        """Makes the tables that a step with such needs reads, neutral in every row.

        Those of banned words are not among them: their shape follows from the words.
        """
        if needs.penalties and self.token_counts is None:
            self.token_counts = self._empty(self._vocab_size).zero_()
        if needs.logit_bias and self.logit_bias is None:
            self.logit_bias = self._empty(self._vocab_size, dtype=torch.float32).zero_()
        if needs.allowed_mask and self.allowed_mask is None:
            self.allowed_mask = self._empty(-(-self._vocab_size // 32)).fill_(-1)

    @torch.inference_mode()
    def fill(self, row: int, seq: Sequence, needs: SamplingNeeds) -> None:
        """Writes a row for a sequence whose tokens are all known.

        Rows of tables that the sequence does not need are made neutral: they may be read, since a
        step reads a table for all of its rows or none.

        Args:
            row: Number of the row.
            seq: The new owner.
            needs: All that it will ever need.
        """
        params = seq.sampling_params
        self.make(needs)
        if needs.penalties and self.token_counts is not None:
            self._fill_counts(self.token_counts[row], seq)
        if self.logit_bias is not None:
            self._fill_bias(self.logit_bias[row], dict(params.logit_bias or {}))
        if self.allowed_mask is not None:
            self._fill_mask(self.allowed_mask[row], params.allowed_token_ids)
        if needs.banned_words or self.banned is not None:
            self._fill_banned(row, banned_words_of(seq), seq.output_token_ids)

    def _fill_counts(self, counts: Tensor, seq: Sequence) -> None:
        counts.zero_()
        counts[self._ids(seq.prompt_token_ids)] = 1
        output = self._ids(seq.output_token_ids)
        counts.index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))

    def _fill_bias(self, row: Tensor, biases: dict[int, float]) -> None:
        row.zero_()
        if biases:
            values = to_device(list(biases.values()), torch.float32, self._device)
            row.index_copy_(0, self._ids(list(biases)), values)

    def _fill_mask(self, row: Tensor, allowed: object) -> None:
        if not isinstance(allowed, tuple):
            row.fill_(-1)
            return
        words = [0] * row.shape[0]
        for token_id in allowed:
            words[token_id // 32] |= 1 << token_id % 32
        signed = [word - 2**32 if word >= 2**31 else word for word in words]
        row.copy_(to_device(signed, torch.int32, self._device))

    def _fill_banned(self, row: int, words: list[BannedWord], output: list[int]) -> None:
        num_words = max(_SMALLEST_WORDS, len(words))
        length = max([1, *(len(word.token_ids) for word in words)])
        banned, recent = self._widen_banned(num_words, length)
        length = banned.shape[2] - 1
        banned[row] = -1
        if not words:
            return
        values = [
            [-1] * (length - len(word.token_ids)) + [*word.token_ids, word.until] for word in words
        ]
        banned[row, : len(words)] = to_device(torch.tensor(values), torch.int32, self._device)
        newest = [-1] * (length - 1) + output
        recent[row] = to_device(newest[len(newest) - (length - 1) :], torch.int32, self._device)

    def _widen_banned(self, num_words: int, length: int) -> tuple[Tensor, Tensor]:
        """Makes the tables large enough; sizes are powers of two, since each has its own graphs."""
        old, old_recent = self.banned, self.recent
        if old is not None and old_recent is not None:
            if old.shape[1] >= num_words and old.shape[2] > length:
                return old, old_recent
            num_words, length = max(num_words, old.shape[1]), max(length, old.shape[2] - 1)
        num_words, length = (1 << (size - 1).bit_length() for size in (num_words, length))
        banned = self._empty(num_words, length + 1).fill_(-1)
        recent = self._empty(length - 1).fill_(-1)
        if old is not None and old_recent is not None:
            banned[:, : old.shape[1], length + 1 - old.shape[2] :] = old
            # What came before the tokens that were kept is not known: no word there is that long.
            recent[:, length - 1 - old_recent.shape[1] :] = old_recent
        self.banned, self.recent = banned, recent
        return banned, recent

    def _empty(self, *width: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(self._num_rows, *width, dtype=dtype, device=self._device)

    def _ids(self, token_ids: list[int]) -> Tensor:
        return to_device(token_ids, torch.int64, self._device)
