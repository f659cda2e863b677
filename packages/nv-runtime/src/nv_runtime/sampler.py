"""From logits to token ids, on the device alone.

It reads how to sample from the rows of `DeviceBatch` and from `SamplingTables`, and notes what it
sampled there, so that it runs inside a CUDA graph and one step ahead of the host. The maths is
`nv_kernels.sample_tokens`; its noise is keyed by (seed, position, token id), so a row's token
depends on its own logits, parameters, seed and history alone: not on the batch it runs in, on
chunking, on prefix hits or on preemption.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from nv_core import SchedulingError
from nv_kernels import (
    LogitAdjustments,
    TokenFilters,
    TokenLogprobs,
    advance_decode_state,
    sample_tokens,
    token_logprobs,
)
from nv_models import CausalLM
from nv_runtime.device_batch import (
    COLUMNS,
    IS_ACTIVE,
    MIN_P,
    PENALTIES,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from nv_runtime.sampling_needs import PLAIN, SamplingNeeds
from nv_runtime.sampling_tables import SamplingTables
from nv_runtime.sharded_sampling import sample_from_shard


@dataclass(frozen=True)
class SampledTokens:
    """What sampling leaves behind.

    Attributes:
        token_ids: [num_rows] int64.
        logprobs: Log-probabilities under the model's own logits; None unless asked for.
    """

    token_ids: Tensor
    logprobs: TokenLogprobs | None = None


class Sampler:
    """Samples the next token of resident sequences."""

    def __init__(self, model: CausalLM, rows: Tensor, tables: SamplingTables) -> None:
        """Takes what every step reads and writes.

        Args:
            model: Whose logits are sampled, for the ranks that share its vocabulary.
            rows: The rows of `DeviceBatch`; tokens are written to those that take part.
            tables: Their tables.
        """
        self._model = model
        self._rows = rows
        self._tables = tables

    @torch.inference_mode()
    def __call__(
        self,
        shard: Tensor,
        batch: Tensor,
        state: Tensor,
        positions: Tensor,
        needs: SamplingNeeds,
        *,
        advances_length: bool = False,
    ) -> SampledTokens:
        """Samples one token per row and stores it in the row.

        Args:
            shard: This rank's logits, [num_rows, tokens per rank]; may be changed.
            batch: Numbers of the rows, [num_rows] int32; only the padding row may occur twice.
            state: Those rows' state, [num_rows, at least FIRST_BLOCK] int32, an even row stride.
            positions: Position in its sequence that each new token will have, [num_rows] int64.
            needs: All that any of the rows needs.
            advances_length: Whether to advance the rows' lengths, too.

        Returns:
            The tokens, the same on every rank; padding rows have token 0.
        """
        floats = state.view(torch.float32)
        draw = (
            floats[:, TEMPERATURE],
            state[:, SEED : SEED + 2].view(torch.int64)[:, 0],
            positions,
        )

        def store(token_ids: Tensor) -> Tensor:
            # A padding row's logits mean nothing; its token must still be one.
            return advance_decode_state(
                self._rows, batch, token_ids, columns=COLUMNS, advances_length=advances_length
            )

        if needs == PLAIN:
            return SampledTokens(store(sample_from_shard(self._model, shard, *draw)))
        # What needs the whole row gathers it.
        rows = batch.long()
        logits = self._model.gather_logits(shard)
        banned = self._ban(logits, rows, positions) if needs.banned_words else None
        filters = None
        if needs.filters:
            filters = TokenFilters(state[:, TOP_K], floats[:, TOP_P], floats[:, MIN_P])
        adjustments = self._adjustments(batch, floats, needs)
        token_ids = sample_tokens(logits, *draw, adjustments=adjustments, filters=filters)
        # A token that two ranks saw differently would part their sequences for good.
        self._model.tensor_parallel.broadcast(token_ids)
        token_ids = store(token_ids)
        self._note(rows, token_ids, state[:, IS_ACTIVE], needs)
        if needs.num_top is None:
            return SampledTokens(token_ids)
        if banned is not None:
            # Log-probabilities and ranks are of the model's own logits.
            logits.scatter_(1, *banned)
        logprobs = token_logprobs(logits, token_ids, num_top=needs.num_top)
        return SampledTokens(token_ids, logprobs)

    def _adjustments(
        self, batch: Tensor, floats: Tensor, needs: SamplingNeeds
    ) -> LogitAdjustments | None:
        if not (needs.penalties or needs.logit_bias or needs.allowed_mask):
            return None
        tables = self._tables
        return LogitAdjustments(
            table_rows=batch,
            allowed_mask=tables.allowed_mask if needs.allowed_mask else None,
            logit_bias=tables.logit_bias if needs.logit_bias else None,
            token_counts=tables.token_counts if needs.penalties else None,
            penalties=floats[:, PENALTIES : PENALTIES + 3] if needs.penalties else None,
        )

    def _ban(self, logits: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Bans the last token of every run that the newest tokens have begun.

        Returns:
            Token ids and the logits that they had before, [num_rows, num_words] each.
        """
        banned, recent = self._tables.banned, self._tables.recent
        if banned is None or recent is None:
            raise SchedulingError("a step bans words, but no sequence has brought any")
        words = banned[rows]
        begun, last, until = words[:, :, :-2], words[:, :, -2], words[:, :, -1]
        is_begun = ((begun < 0) | (begun == recent[rows][:, None, :])).all(dim=-1)
        is_banned = is_begun & (last >= 0) & (positions[:, None] < until)
        token_ids = last.clamp(min=0).long()
        before = logits.gather(1, token_ids)
        # A minimum, since one token may end several runs, of which not all are begun.
        limit = torch.where(is_banned, -torch.inf, torch.inf).to(logits.dtype)
        logits.scatter_reduce_(1, token_ids, limit, "amin")
        return token_ids, before

    def _note(
        self, rows: Tensor, token_ids: Tensor, is_active: Tensor, needs: SamplingNeeds
    ) -> None:
        """Notes new tokens where later steps look for them."""
        counts, recent = self._tables.token_counts, self._tables.recent
        if needs.penalties and counts is not None:
            places = rows * counts.shape[1] + token_ids
            counts.view(-1).index_add_(0, places, 2 * is_active)
        if needs.banned_words and recent is not None and recent.shape[1]:
            newest = torch.cat([recent[rows][:, 1:], token_ids.int()[:, None]], dim=1)
            recent.index_copy_(0, rows, newest)


def derive_seed(engine_seed: int, request_number: int) -> int:
    """Makes the seed of a request that brought none, in [0, 2**64)."""
    return xxhash.xxh64_intdigest(request_number.to_bytes(8, "little"), engine_seed)
