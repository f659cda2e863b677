"""ModelRunner: runs one step's plan on the device.

It owns the model, the KV pool and the random keys; it knows nothing of queues, requests or text.
`launch` starts a step and returns at once where the device allows it; `collect` waits for its
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nv_core import ScheduledSequence, StepPlan
from nv_kernels import LayerKVCache
from nv_models import CausalLM
from nv_runtime.input_builder import build_model_input
from nv_runtime.sampler import SamplingRow, sample


@dataclass(frozen=True)
class StepHandle:
    """A launched step.

    Attributes:
        seq_ids: Sequences that get a token, in the order of `token_ids`.
        token_ids: The tokens, on the host, [len(seq_ids)] int64; valid once `ready` has passed.
        ready: Marks the arrival of the tokens; None if they are there already.
    """

    seq_ids: tuple[int, ...]
    token_ids: Tensor
    ready: torch.cuda.Event | None


class ModelRunner:
    """Executes plans with one model on one device."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: tuple[LayerKVCache, ...],
        *,
        block_size: int,
        device: torch.device,
        seed_of: Callable[[int], int],
    ) -> None:
        """Takes a loaded model and an allocated pool.

        Args:
            model: The model, on `device`.
            kv_caches: One cache per layer, on `device`; written by every step.
            block_size: Tokens per KV block.
            device: Where everything runs.
            seed_of: Gives a seed, from its `seq_id`, to a sequence that brought none.
        """
        self._model = model
        self._kv_caches = kv_caches
        self._block_size = block_size
        self._device = device
        self._seed_of = seed_of

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts a step: forward pass, logits of the rows that need them, sampling."""
        entries = [entry for entry in plan.sequences if entry.samples]
        if not plan.sequences:
            return StepHandle((), torch.empty(0, dtype=torch.int64), None)
        model_input = build_model_input(plan, block_size=self._block_size, device=self._device)
        hidden = self._model(
            model_input.token_ids, model_input.positions, self._kv_caches, model_input.metadata
        )
        seq_ids = tuple(entry.seq_id for entry in entries)
        if not entries:
            return StepHandle(seq_ids, torch.empty(0, dtype=torch.int64), self._mark())
        logits = self._model.compute_logits(hidden[model_input.sample_rows])
        token_ids = sample(logits, [self._sampling_row(entry) for entry in entries])
        return StepHandle(seq_ids, token_ids.to("cpu", non_blocking=True), self._mark())

    def collect(self, handle: StepHandle) -> dict[int, int]:
        """Waits for a step and returns the token of each sequence that got one."""
        if handle.ready is not None:
            handle.ready.synchronize()
        return dict(zip(handle.seq_ids, handle.token_ids.tolist(), strict=True))

    def _mark(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _sampling_row(self, entry: ScheduledSequence) -> SamplingRow:
        seq = entry.sequence
        seed = seq.sampling_params.seed
        return SamplingRow(
            params=seq.sampling_params,
            seed=self._seed_of(entry.seq_id) if seed is None else seed,
            token_ids=seq.token_ids,
            num_prompt_tokens=seq.num_prompt_tokens,
            stop_token_ids=seq.stop_token_ids,
        )
