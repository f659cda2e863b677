"""Token embedding and LM head, their rows split over the ranks.

Each rank holds `ceil(vocab_size / size)` rows, rounded up to a multiple of 16: sampling draws among
groups of 16 tokens, which must not be torn (`nv_kernels.sample_shard`). Where that does not divide,
the last ranks hold fewer tokens or none; the rest of their rows are zero, no token id leads to
them, and their logits are cut off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional

from nv_kernels import linear
from nv_models.layers.linear import packed
from nv_models.weight_target import TensorTarget

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nv_models.layers.placement import Placement


class VocabParallelEmbedding(nn.Module):
    """A lookup table whose rows are split over the ranks.

    Args:
        vocab_size: Number of token ids over all ranks.
        hidden_size: Size of an embedding.
        placement: Where the weights live.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, placement: Placement) -> None:
        super().__init__()
        self.tensor_parallel = placement.tensor_parallel
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.rows_per_rank = _rows_per_rank(vocab_size, self.tensor_parallel.size)
        self.first_token = min(self.tensor_parallel.rank * self.rows_per_rank, vocab_size)
        self.num_tokens = min(self.rows_per_rank, vocab_size - self.first_token)
        self.weight = placement.empty_weight(self.rows_per_rank, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Looks up embeddings.

        Args:
            token_ids: [num_tokens] int64, each below `vocab_size`.

        Returns:
            [num_tokens, hidden_size], the same on every rank.
        """
        if self.tensor_parallel.size == 1:
            return functional.embedding(token_ids, self.weight)
        local = token_ids - self.first_token
        elsewhere = (local < 0) | (local >= self.num_tokens)
        found = functional.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.tensor_parallel.all_reduce(found.masked_fill_(elsewhere.unsqueeze(-1), 0))

    def targets(self, name: str, *, aliases: tuple[str, ...] = ()) -> Iterator[TensorTarget]:
        """Yields where the checkpoint tensor of the table goes.

        Args:
            name: Its name in the checkpoint, without ".weight".
            aliases: Full names under which the same tensor may also be stored.
        """
        yield TensorTarget(
            name=f"{name}.weight",
            shape=(self.vocab_size, self.hidden_size),
            source=(
                (self.first_token, self.first_token + self.num_tokens),
                (0, self.hidden_size),
            ),
            parameter=self.weight,
            first_row=0,
            num_rows=self.rows_per_rank,
            aliases=aliases,
        )


class ParallelLMHead(nn.Module):
    """The projection from hidden states to logits, its rows split over the ranks.

    Args:
        embedding: The embedding of the same vocabulary; gives the sizes and how rows are split.
        tied: Whether the head is the embedding matrix itself instead of one of its own.
        placement: Where the weights live.
    """

    def __init__(
        self, embedding: VocabParallelEmbedding, *, tied: bool, placement: Placement
    ) -> None:
        super().__init__()
        self.tensor_parallel = placement.tensor_parallel
        self.vocab_size = embedding.vocab_size
        self.tied = tied
        self.packed_weight: nn.Parameter | None = None
        self.rows = (
            embedding
            if tied
            else VocabParallelEmbedding(
                embedding.vocab_size, embedding.hidden_size, placement=placement
            )
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Computes the logits of this rank's tokens.

        Args:
            hidden: [num_rows, hidden_size], the same on every rank.

        Returns:
            [num_rows, tokens per rank], padding included: the first `rows.num_tokens` columns are
            the logits of the tokens from `rows.first_token` on.
        """
        weight = self.rows.weight if self.packed_weight is None else self.packed_weight
        return linear(hidden, weight)

    def gather(self, shard: Tensor) -> Tensor:
        """Joins what `forward` returned on each rank.

        Returns:
            [num_rows, vocab_size] without padding, the same on every rank.
        """
        return self.tensor_parallel.all_gather_last_dim(shard)[:, : self.vocab_size]

    def pack(self) -> None:
        """Brings the loaded weight into the layout that products read fastest.

        A tied weight stays beside its packed copy: looking up rows needs it as it was.
        """
        weight = packed(self.rows.weight)
        if not self.tied:
            self.rows.weight = weight
        elif weight.is_mkldnn:
            self.packed_weight = weight

    def targets(self, name: str) -> Iterator[TensorTarget]:
        """Yields where the head's own checkpoint tensor goes; only for a head that is not tied."""
        yield from self.rows.targets(name)


def _rows_per_rank(vocab_size: int, size: int) -> int:
    """Rows of one of several ranks; a single one needs no padding."""
    return vocab_size if size == 1 else 16 * -(-vocab_size // (16 * size))
