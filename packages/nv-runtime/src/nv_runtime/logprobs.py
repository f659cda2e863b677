"""Log-probabilities on their way to the caller: from a step's tensors to `Logprob`s by token id."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from nv_kernels import TokenLogprobs
from nv_runtime.outputs import Logprob

if TYPE_CHECKING:
    from nv_runtime.tokenizer import Tokenizer


def to_host(values: TokenLogprobs, count: int) -> TokenLogprobs:
    """Starts copying the first rows to the host; they are there when the stream has passed."""

    def copied(tensor: Tensor) -> Tensor:
        # A copy in any case: a graph's output is overwritten by its next replay.
        return tensor[:count].to("cpu", non_blocking=True, copy=True)

    return TokenLogprobs(
        logprobs=copied(values.logprobs),
        ranks=copied(values.ranks),
        top_logprobs=copied(values.top_logprobs),
        top_token_ids=copied(values.top_token_ids),
    )


class LogprobReader:
    """Turns rows of a step's log-probabilities into what callers get."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Takes what decodes single tokens.

        Args:
            tokenizer: None for log-probabilities without text.
        """
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def read(
        self,
        values: TokenLogprobs,
        row: int,
        token_id: int,
        *,
        num_top: int,
        decodes: bool,
    ) -> dict[int, Logprob]:
        """Reads one row.

        Args:
            values: On the host.
            row: The row.
            token_id: The token that its own log-probability is of.
            num_top: How many most probable tokens to return, at most those that are there; -1 for
                all.
            decodes: Whether to add texts.

        Returns:
            The token first, then the most probable ones, which may repeat it.
        """
        top = values.top_token_ids.shape[1]
        top = top if num_top < 0 else min(num_top, top)
        token_ids = [token_id, *values.top_token_ids[row, :top].tolist()]
        logprobs = [float(values.logprobs[row]), *values.top_logprobs[row, :top].tolist()]
        ranks = [int(values.ranks[row]), *range(1, top + 1)]
        return {
            item: Logprob(logprob, rank, self._text(item) if decodes else None)
            for item, logprob, rank in zip(token_ids, logprobs, ranks, strict=True)
        }

    def _text(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._texts.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._texts[token_id] = text
        return text
