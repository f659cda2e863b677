"""What sampling may do to logits before it draws: change some, and leave tokens out.

Plain bundles of tensors; `nv_kernels.ops.sampling` says what is done with them and in which order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nv_kernels.checks import check_last_dim_contiguous, check_tensor
from nv_kernels.errors import KernelInputError

if TYPE_CHECKING:
    from torch import Tensor

REPETITION, FREQUENCY, PRESENCE = 0, 1, 2
"""Columns of `LogitAdjustments.penalties`."""


@dataclass(frozen=True)
class LogitAdjustments:
    """Changes of single logits, looked up in tables that outlive the batch.

    Tables may have any stride between rows; `table_rows` is trusted, not checked.

    Attributes:
        table_rows: Each row's own row in the tables, [num_rows] int32, any stride.
        allowed_mask: One bit per token, [num_table_rows, >= ceil(vocab_size / 32)] int32: bit
            `t % 32` of word `t // 32` is 1 where token t may be drawn. None allows all.
        logit_bias: Is added to the logits, [num_table_rows, vocab_size] fp32; None for none.
        token_counts: What the penalties look at, [num_table_rows, vocab_size] int32: twice the
            number of times that the token stands in the output, plus 1 if it stands in the prompt.
            None for no penalties.
        penalties: Repetition (1 for none), frequency (0) and presence penalty (0),
            [num_rows, 3] fp32, any stride between rows; None exactly where `token_counts` is.
    """

    table_rows: Tensor
    allowed_mask: Tensor | None = None
    logit_bias: Tensor | None = None
    token_counts: Tensor | None = None
    penalties: Tensor | None = None

    def check(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Raises unless all tensors fit the logits.

        Raises:
            KernelInputError: A shape, dtype, stride or device is not allowed.
        """
        check_tensor(
            "table_rows",
            self.table_rows,
            "[num_rows]",
            [num_rows],
            dtypes=(torch.int32,),
            device=device,
        )
        for name, table, width_name, width, dtype in (
            ("allowed_mask", self.allowed_mask, "num_words", None, torch.int32),
            ("logit_bias", self.logit_bias, "vocab_size", vocab_size, torch.float32),
            ("token_counts", self.token_counts, "vocab_size", vocab_size, torch.int32),
        ):
            if table is not None:
                layout = f"[num_table_rows, {width_name}]"
                check_tensor(name, table, layout, [None, width], dtypes=(dtype,), device=device)
                check_last_dim_contiguous(name, table)
        num_words = -(-vocab_size // 32)
        if self.allowed_mask is not None and self.allowed_mask.shape[1] < num_words:
            raise KernelInputError(
                f"allowed_mask has {self.allowed_mask.shape[1]} words a row, but {vocab_size} "
                f"tokens need at least {num_words}, of 32 bits each. Give every token a bit."
            )
        if self.token_counts is not None or self.penalties is not None:
            # An absent partner is shown as an empty tensor, whose shape the message then names.
            penalties = torch.empty(0) if self.penalties is None else self.penalties
            counts = torch.empty(0) if self.token_counts is None else self.token_counts
            check_tensor(
                "token_counts",
                counts,
                "[num_table_rows, vocab_size]",
                [None, vocab_size],
                dtypes=(torch.int32,),
            )
            check_tensor(
                "penalties",
                penalties,
                "[num_rows, 3]",
                [num_rows, 3],
                dtypes=(torch.float32,),
                device=device,
            )
            check_last_dim_contiguous("penalties", penalties)


@dataclass(frozen=True)
class TokenFilters:
    """Which tokens are left out of a draw for being improbable.

    The most probable one always stays, and all that are equal to it.

    Attributes:
        top_k: Keeps this many most probable tokens, [num_rows] int32, any stride; 0 keeps all.
        top_p: Keeps the smallest set that reaches this probability, [num_rows] fp32, any stride;
            1 keeps all.
        min_p: Drops tokens less probable than this share of the best one's, [num_rows] fp32, any
            stride; 0 keeps all.
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def check(self, num_rows: int, device: torch.device) -> None:
        """Raises unless all tensors fit the logits.

        Raises:
            KernelInputError: A shape, dtype or device is not allowed.
        """
        for name, tensor, dtype in (
            ("top_k", self.top_k, torch.int32),
            ("top_p", self.top_p, torch.float32),
            ("min_p", self.min_p, torch.float32),
        ):
            check_tensor(name, tensor, "[num_rows]", [num_rows], dtypes=(dtype,), device=device)
