"""EngineStepLog: writes the engine's own step log, in the format of the simulator.

It notes when each step was planned, launched and collected, on the host. With a step in flight the
time from one collected step to the next is what a step costs, whether the device or the host is the
slower of the two, so that is what `nv_core.sim` fits its latency models to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch

from nv_core import Scheduler, Sequence, StepPlan
from nv_core.step_log import BlockTracker, LogHeader, RequestRecord, StepLogWriter, record_plan
from nv_models import ModelConfig
from nv_runtime.request import now

logger = logging.getLogger(__name__)


class EngineStepLog:
    """Follows one engine and writes down what it does.

    Costs some 50 us a step for a batch of 256; the file is complete whenever the engine is idle. A
    file that cannot be written any more, as on a full disk, ends with a warning: serving goes on.
    """

    def __init__(self, path: str, header: LogHeader) -> None:
        """Creates the file.

        Args:
            path: Where to write; an existing file is replaced.
            header: See `make_header`.

        Raises:
            OSError: The file cannot be written.
        """
        self._writer = StepLogWriter(path, header)
        self._origin = now()
        self._requests: dict[int, RequestRecord] = {}
        self._launched: dict[int, tuple[float, float]] = {}
        self._blocks = BlockTracker()
        # By plans that failed, since the last step of the log.
        self._released_in_vain: tuple[int, ...] = ()
        self._is_open = True

    def note_added(self, seq: Sequence) -> None:
        """Notes a request that the scheduler has accepted."""
        arrival = now() if seq.arrival_time is None else seq.arrival_time
        request = RequestRecord.of(seq, arrival - self._origin)
        self._write(lambda: self._writer.add_request(request))
        self._requests[seq.seq_id] = request

    def note_launched(self, plan: StepPlan, *, planned: float) -> None:
        """Notes that a plan was handed to the device.

        Args:
            plan: The plan.
            planned: When its planning began, in the engine's clock.
        """
        self._launched[plan.step_id] = (planned - self._origin, now() - self._origin)

    def note_collected(self, plan: StepPlan, *, done: float) -> None:
        """Notes that the tokens of a plan are there.

        Args:
            plan: The oldest plan that was launched and not collected.
            done: When they came, in the engine's clock.
        """
        planned_s, launched_s = self._launched.pop(plan.step_id)
        step = record_plan(
            plan,
            planned_s=planned_s,
            launched_s=launched_s,
            done_s=done - self._origin,
            new_blocks=self._blocks.follow(plan),
        )
        if self._released_in_vain:
            step = step._replace(released=self._released_in_vain + plan.released)
            self._released_in_vain = ()
        self._write(lambda: self._writer.add_step(step))

    def note_failed(self, plans: Iterable[StepPlan]) -> None:
        """Notes that steps are lost: they are no events, but what they released is released.

        Args:
            plans: All that are in flight, the oldest first.
        """
        self._launched.clear()
        for plan in plans:
            self._blocks.follow(plan)
            self._released_in_vain += plan.released

    def note_finished(self, seq: Sequence) -> None:
        """Notes that a request has ended."""
        request = self._requests.pop(seq.seq_id)
        request.end(seq, now() - self._origin)
        self._write(lambda: self._writer.finish_request(request))
        if not self._requests:
            self._write(self._writer.flush)

    def note_withdrawn(self, seq: Sequence) -> None:
        """Notes the end of a request that failed while it was added, if it was noted at all."""
        if seq.seq_id in self._requests:
            self.note_finished(seq)

    def close(self) -> None:
        """Closes the file; calling it again does nothing."""
        self._write(self._writer.close)
        self._is_open = False

    def _write(self, write: Callable[[], None]) -> None:
        if not self._is_open:
            return
        try:
            write()
        except OSError as error:
            self._is_open = False
            with suppress(OSError):
                self._writer.close()
            logger.warning("the step log ends here, since it cannot be written: %s", error)


def make_header(
    scheduler: Scheduler,
    model_config: ModelConfig,
    *,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    device: torch.device,
    num_steps_ahead: int,
) -> LogHeader:
    """Makes the header of an engine's log.

    Args:
        scheduler: Gives the limits.
        model_config: The model; its shape goes into the log, so that a latency model can be fitted.
        dtype: Of weights and activations.
        kv_cache_dtype: Of the KV cache.
        device: What runs it.
        num_steps_ahead: As of the engine.
    """
    is_cuda = device.type == "cuda"
    model = {
        "name": model_config.architecture,
        "num_layers": model_config.num_layers,
        "hidden_size": model_config.hidden_size,
        "intermediate_size": model_config.intermediate_size,
        "num_heads": model_config.num_heads,
        "num_kv_heads": model_config.num_kv_heads,
        "head_dim": model_config.head_dim,
        "vocab_size": model_config.vocab_size,
        "tie_word_embeddings": model_config.tie_word_embeddings,
        "dtype_bytes": dtype.itemsize,
        "kv_dtype_bytes": kv_cache_dtype.itemsize,
    }
    return LogHeader.of(
        scheduler.config,
        source="engine",
        num_steps_ahead=num_steps_ahead,
        model=model,
        device=torch.cuda.get_device_name(device) if is_cuda else "cpu",
    )
