"""ModelRunner: runs one step's plan on the device.

It owns the model, the KV pool and the device's rows; it knows nothing of queues, requests or text.
`launch` starts a step and returns at once where the device allows it; `collect` waits for its
tokens. Steps run in the order in which they are launched.

A plan in which every sequence computes one token and samples the next is a decode step: it runs on
the device's rows alone. Every other plan is a mixed step, built from the plan's own data. Both run
as CUDA graphs where there is CUDA, excepted mixed steps so long that the device is busy anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nv_core import ScheduledBatch, ScheduledSequence, StepPlan
from nv_kernels import LayerKVCache, TokenLogprobs
from nv_models import CausalLM
from nv_runtime.captured_graphs import CapturedGraphs, GraphPool
from nv_runtime.cuda_graphs import (
    CaptureAttempts,
    DecodeGraphs,
    MixedGraphs,
    longest_graphed_step,
)
from nv_runtime.decode_step import DecodeStep
from nv_runtime.device_batch import FIRST_BLOCK, TOKEN, DeviceBatch
from nv_runtime.input_builder import layout_of, pack_step
from nv_runtime.logprobs import to_host
from nv_runtime.mixed_step import MixedStep
from nv_runtime.prompt_logprobs import (
    PromptLogprobs,
    compute_prompt_logprobs,
    prompt_rows_of,
)
from nv_runtime.sampler import SampledTokens, Sampler
from nv_runtime.sampling_needs import PLAIN, SamplingNeeds
from nv_runtime.step_memory import decode_pool_bytes, mixed_pool_bytes
from nv_runtime.transfer import to_device


@dataclass(frozen=True)
class StepHandle:
    """A launched step.

    Attributes:
        seq_ids: Sequences that get a token, in the order of `token_ids`.
        token_ids: The tokens, on the host, [len(seq_ids)] int64; valid once `ready` has passed, as
            everything below.
        logprobs: Their log-probabilities, on the host; None if no sequence asked for any.
        prompt_logprobs: What the step says of prompts whose log-probabilities were asked for.
        ready: Marks the arrival of the tokens; None if they are there already.
    """

    seq_ids: tuple[int, ...]
    token_ids: Tensor
    logprobs: TokenLogprobs | None
    prompt_logprobs: Sequence[PromptLogprobs]
    ready: torch.cuda.Event | None


class ModelRunner:
    """Executes plans with one model on one device.

    Attributes:
        graphs: All CUDA graphs.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_caches: tuple[LayerKVCache, ...],
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        device: torch.device,
        use_graphs: bool,
        seed_of: Callable[[int], int],
        usual_needs: SamplingNeeds = PLAIN,
    ) -> None:
        """Takes a loaded model and an allocated pool.

        Args:
            model: The model, on `device`.
            kv_caches: One cache per layer, on `device`; written by every step.
            block_size: Tokens per KV block.
            max_num_seqs: Most sequences that hold blocks at once.
            max_num_batched_tokens: Most tokens in one step.
            max_model_len: Longest sequence, in tokens.
            device: Where everything runs.
            use_graphs: Whether decode steps and short mixed steps run as CUDA graphs; CUDA only.
            seed_of: Gives a seed, from its `seq_id`, to a sequence that brought none.
            usual_needs: What sampling needs for requests that bring no parameters.
        """
        self.graphs = CapturedGraphs()
        self._model = model
        self._block_size = block_size
        self._device = device
        self._batch = DeviceBatch(
            max_num_seqs=max_num_seqs,
            max_batch=max_num_seqs,
            max_blocks=-(-max_model_len // block_size),
            vocab_size=model.config.vocab_size,
            device=device,
            # No method of self: that would make a cycle, and keep a dropped model in memory.
            seed_of=partial(_seed, seed_of=seed_of),
        )
        self._sampler = Sampler(model, self._batch.rows, self._batch.tables)
        self._decode_step = DecodeStep(
            model, kv_caches, self._batch.rows, self._sampler, block_size=block_size
        )
        self._mixed_step = MixedStep(model, kv_caches)
        self._decode_graphs: DecodeGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None
        if use_graphs:
            max_graphed = longest_graphed_step(model.config, model.tensor_parallel.size)
            max_graphed = min(max_graphed, max_num_batched_tokens)
            self._mixed_graphs = MixedGraphs(
                self._mixed_step,
                captured=self.graphs,
                attempts=CaptureAttempts(model.tensor_parallel, device),
                pool=GraphPool(mixed_pool_bytes(model.config, model.dtype, max_graphed), device),
                max_tokens=max_graphed,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                block_size=block_size,
            )
            self._decode_graphs = DecodeGraphs(
                self._decode_step,
                tables=self._batch.tables,
                captured=self.graphs,
                attempts=CaptureAttempts(model.tensor_parallel, device),
                pool=GraphPool(decode_pool_bytes(model.config, model.dtype, max_num_seqs), device),
                padding_row=self._batch.padding_row,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                usual_needs=usual_needs,
            )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts a step: forward pass, logits of the rows that need them, sampling.

        After an error, `reset` must come before the next launch.
        """
        with self._on_device():
            return self._launch(plan)

    @property
    def num_graphs_ahead(self) -> int:
        """See `Executor`."""
        return 0 if self._decode_graphs is None else self._decode_graphs.num_ahead

    @torch.inference_mode()
    def capture_next_graph(self) -> bool:
        """See `Executor`; writes to the padding row alone. With several ranks, all must call it."""
        if self._decode_graphs is None:
            return False
        with self._on_device():
            return self._decode_graphs.capture_next(self._batch.batch)

    def check(self) -> None:
        """See `Executor`: a step that failed leaves nothing that is in the way of the next."""

    def reset(self) -> None:
        """Forgets every sequence, after a step that failed; the next plans bring them anew.

        All steps that were launched must be collected or given up, and their plans committed.
        """
        self._batch.forget()

    def shutdown(self) -> None:
        """Has nothing to end: memory is freed with the runner."""

    def _launch(self, plan: StepPlan) -> StepHandle:
        changes = self._batch.follow(plan)
        batch = plan.sequences
        if not batch:
            self._batch.send(changes)
            return StepHandle((), torch.empty(0, dtype=torch.int64), None, (), None)
        prompt_logprobs: Sequence[PromptLogprobs] = ()
        if plan.is_decode:
            # The longest first, so that what is left when an attention kernel runs dry is short.
            lengths = batch.num_computed_tokens
            order = sorted(range(len(batch)), key=lengths.__getitem__, reverse=True)
            sampled = self._run_decode(batch, order, changes)
            seq_ids = tuple([batch.seq_ids[place] for place in order])
        else:
            self._batch.send(changes)
            sampled, prompt_logprobs = self._run_mixed(plan)
            seq_ids = plan.sampled_seq_ids
        # A copy in any case: a graph's output is overwritten by its next replay.
        count = len(seq_ids)
        token_ids = sampled.token_ids[:count].to("cpu", non_blocking=True, copy=True)
        logprobs = None if sampled.logprobs is None else to_host(sampled.logprobs, count)
        return StepHandle(seq_ids, token_ids, logprobs, prompt_logprobs, self._mark())

    def collect(self, handle: StepHandle) -> dict[int, int]:
        """Waits for a step and returns the token of each sequence that got one."""
        if handle.ready is not None:
            handle.ready.synchronize()
        return dict(zip(handle.seq_ids, handle.token_ids.tolist(), strict=True))

    def _run_decode(
        self, batch: ScheduledBatch, order: Sequence[int], changes: list[tuple[int, int]]
    ) -> SampledTokens:
        """Runs a decode step in a given order; returns its tokens, then padding's."""
        graphs = self._decode_graphs
        size = len(batch) if graphs is None else graphs.padded_size(len(batch))
        changes += self._batch.prepare_decode(batch, order, padded_size=size)
        self._batch.send(changes)
        longest = 1 + max(batch.num_computed_tokens)
        run: Callable[..., SampledTokens] = self._decode_step if graphs is None else graphs.run
        return run(
            self._batch.batch[:size],
            max_context_len=longest,
            needs=self._batch.needs_of(batch),
        )

    def _run_mixed(self, plan: StepPlan) -> tuple[SampledTokens, Sequence[PromptLogprobs]]:
        """Runs any plan; returns the tokens of the entries that sample, in order."""
        graphs = self._mixed_graphs
        prompt_rows = prompt_rows_of(plan)
        # A graph keeps only the hidden states of the rows to sample.
        shape = None if graphs is None or prompt_rows else graphs.shape_for(plan)
        layout = layout_of(plan) if shape is None else shape.layout
        step = pack_step(plan, layout, block_size=self._block_size)
        packed = to_device(step.values, torch.int32, self._device)
        if step.unknown_tokens:
            # Each is the token of the sequence's own row, sampled by a step before this one.
            rows = [self._batch.row_of(seq_id) for seq_id in step.unknown_tokens]
            places = self._indices(list(step.unknown_tokens.values()))
            packed.index_copy_(0, places, self._batch.rows[self._indices(rows), TOKEN])
        if graphs is None or shape is None:
            all_hidden, sample_rows = self._mixed_step(
                packed,
                layout,
                num_samples=step.num_samples,
                max_query_len=step.max_query_len,
                max_context_len=step.max_context_len,
            )
            hidden = all_hidden[sample_rows]
            prompt_logprobs = compute_prompt_logprobs(self._model, all_hidden, prompt_rows)
        else:
            prompt_logprobs = []
            hidden = graphs.run(packed, shape)[: step.num_samples]
        entries = [entry for entry in plan.sequences if entry.samples]
        if not entries:
            nothing = torch.empty(0, dtype=torch.int64, device=self._device)
            return SampledTokens(nothing), prompt_logprobs
        for entry in entries:
            self._batch.note_sampled(entry)
        sampled = self._sample(self._model.compute_logits_shard(hidden), entries)
        return sampled, prompt_logprobs

    def _sample(self, shard: Tensor, entries: Sequence[ScheduledSequence]) -> SampledTokens:
        """Samples one token per entry from this rank's logits and stores it in the entry's row."""
        rows = [self._batch.row_of(entry.seq_id) for entry in entries]
        positions = [_position_sampled(entry) for entry in entries]
        packed = to_device([*rows, *positions], torch.int32, self._device)
        batch = packed[: len(rows)]
        state = self._batch.rows[:, :FIRST_BLOCK].index_select(0, batch)
        return self._sampler(
            shard, batch, state, packed[len(rows) :].long(), self._batch.needs_of(entries)
        )

    def _indices(self, values: list[int]) -> Tensor:
        return to_device(values, torch.int64, self._device)

    def _on_device(self) -> AbstractContextManager[object]:
        """Makes the runner's device the current one, on which graphs and streams are made."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _mark(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def _position_sampled(entry: ScheduledSequence) -> int:
    """Position in the sequence of the token that the entry yields."""
    return entry.num_computed_tokens + entry.num_scheduled_tokens


def _seed(entry: ScheduledSequence, seed_of: Callable[[int], int]) -> int:
    seed = entry.sequence.sampling_params.seed
    return seed_of(entry.seq_id) if seed is None else seed
