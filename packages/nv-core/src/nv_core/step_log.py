"""Step log: what a scheduler did and when, as records in memory or as lines of JSON.

The simulator (`nv_core.sim`) and the engine (`LLM(step_log=path)`) write the same log, so that
metrics, pictures and fits read both. A log is a header, then events in the order in which they
happened: `add` (a request came), `step` (a plan was run and committed), `finish` (a request ended)
and `reject` (a request was refused at the door). Times are seconds since the log began.

A token has no event of its own: each sequence in a step's `sampled` got one at the step's `done_s`,
unless it had ended before (its surplus token is dropped). So a log holds the time of every token.

This module is not imported with `nv_core`; it needs nothing but the standard library.
"""

from __future__ import annotations

import gzip
import json
import zlib
from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Protocol, cast

from nv_core.config import MAX_NUM_BLOCKS, SchedulerConfig, check_size
from nv_core.errors import NvError
from nv_core.plan import StepPlan
from nv_core.sequence import Sequence

FORMAT = "nv-step-log"
VERSION = 1


class StepLogError(NvError, ValueError):
    """A file is no step log, or a line of it cannot be read; the message names the line."""


@dataclass(frozen=True, kw_only=True)
class LogHeader:
    """Under which limits a log came about.

    Attributes:
        source: "engine" or "simulator".
        num_blocks: As in `SchedulerConfig`, like those that follow.
        block_size: Tokens per block.
        max_num_seqs: Most sequences that hold blocks at once.
        max_num_batched_tokens: Token budget of a step.
        max_model_len: Most tokens of a sequence; None if only the pool limits it.
        enable_prefix_caching: Whether equal prefixes share blocks.
        policy: Name of the policy.
        num_steps_ahead: How many steps are launched before the oldest is collected.
        model: The model's shape, see `nv_core.sim.ModelShape`; None if unknown.
        device: What ran it, in words; None if unknown.
    """

    source: str
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    enable_prefix_caching: bool
    policy: str
    num_steps_ahead: int = 0
    model: Mapping[str, Any] | None = None
    device: str | None = None

    @classmethod
    def of(
        cls,
        config: SchedulerConfig,
        *,
        source: str,
        num_steps_ahead: int = 0,
        model: Mapping[str, Any] | None = None,
        device: str | None = None,
    ) -> LogHeader:
        """Makes the header of a log of one scheduler; see the attributes."""
        policy = config.policy
        return cls(
            source=source,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            policy=policy if isinstance(policy, str) else type(policy).__name__,
            num_steps_ahead=num_steps_ahead,
            model=model,
            device=device,
        )


@dataclass(kw_only=True)
class RequestRecord:
    """One request.

    Attributes:
        seq_id: Number of its sequence; None if it was rejected.
        request_id: The caller's name for it.
        arrival_s: When it came.
        num_prompt_tokens: Length of its prompt.
        max_tokens: Most output tokens; None for no limit of its own.
        user: Whom it belongs to.
        priority: Lower is more urgent.
        deadline_s: When its answer is due; None for never.
        num_cached_tokens: Prompt tokens that its first admission found in the cache.
        num_preemptions: How often it lost its blocks.
        finished_s: When it ended; None while it lives.
        finish_reason: Why, as in `FinishReason`; None while it lives.
        message: What whoever asked for it was told when it was dropped or rejected.
    """

    seq_id: int | None
    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    max_tokens: int | None = None
    user: str | None = None
    priority: int = 0
    deadline_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finished_s: float | None = None
    finish_reason: str | None = None
    message: str | None = None

    @classmethod
    def of(cls, seq: Sequence, arrival_s: float) -> RequestRecord:
        """Makes the record of a sequence that the scheduler has just accepted."""
        return cls(
            seq_id=seq.seq_id,
            request_id=seq.request_id,
            arrival_s=arrival_s,
            num_prompt_tokens=seq.num_prompt_tokens,
            max_tokens=seq.sampling_params.max_tokens,
            user=seq.user,
            priority=seq.priority,
            deadline_s=seq.deadline,
        )

    def end(self, seq: Sequence, finished_s: float) -> None:
        """Notes that its sequence has ended."""
        self.num_cached_tokens = seq.num_cached_tokens
        self.num_preemptions = seq.num_preemptions
        self.finished_s = finished_s
        self.finish_reason = None if seq.finish_reason is None else seq.finish_reason.value
        self.message = seq.drop_reason


class StepRecord(NamedTuple):
    """One step that was run and committed.

    Attributes:
        step_id: Number of the step.
        planned_s: When its planning began.
        launched_s: When it was handed to the device; in a simulation, when the device began it.
        done_s: When its tokens were there.
        seq_ids: The batch, in the order in which the policy granted it.
        computed: Tokens of each that were in the KV cache before.
        scheduled: Tokens of each that the step computed.
        sampled: Those of `seq_ids` that got a token.
        preempted: Ids of the sequences that lost their blocks while it was planned.
        dropped: Ids of those that the policy ended.
        released: Ids of all that lost their blocks since the step before.
        refused: Ids of those that the policy asked for in vain, each with the reason.
        new_blocks: By id of a sequence, the blocks that its table has gained since the log last
            named it; empty where blocks are not logged.
        num_scheduled_tokens: Tokens that it computed, all sequences together.
        num_hit_tokens: Tokens that its admissions need not compute.
        num_waiting: Sequences left without blocks.
        num_running: Sequences that hold blocks.
        num_used_blocks: Blocks that sequences hold.
        num_free_blocks: Blocks left free, those with cached content included.
        num_cached_blocks: Blocks, used or free, whose content can be found.
    """

    step_id: int
    planned_s: float
    launched_s: float
    done_s: float
    seq_ids: Seq[int]
    computed: Seq[int]
    scheduled: Seq[int]
    sampled: Seq[int]
    preempted: Seq[int]
    dropped: Seq[int]
    released: Seq[int]
    refused: Seq[tuple[int, str]]
    new_blocks: Mapping[int, Seq[int]]
    num_scheduled_tokens: int
    num_hit_tokens: int
    num_waiting: int
    num_running: int
    num_used_blocks: int
    num_free_blocks: int
    num_cached_blocks: int


class StepLogSink(Protocol):
    """Takes the events of a log as they happen: `StepLog` keeps them, `StepLogWriter` writes."""

    def add_request(self, request: RequestRecord) -> None:
        """Takes a request that came, or one that was rejected (its `seq_id` is None)."""

    def add_step(self, step: StepRecord) -> None:
        """Takes a step that was committed."""

    def finish_request(self, request: RequestRecord) -> None:
        """Takes the end of a request that was added."""


@dataclass
class StepLog:
    """A log in memory.

    Attributes:
        header: See `LogHeader`.
        requests: Requests by `seq_id`, in the order in which they came.
        rejected: Requests that the scheduler could never have served.
        steps: Steps, in order.
        is_truncated: Whether the file that it was read from ends within a line, or within its
            packing, as when the process that wrote it was killed or still writes.
    """

    header: LogHeader
    requests: dict[int, RequestRecord] = field(default_factory=dict)
    rejected: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    is_truncated: bool = False

    def add_request(self, request: RequestRecord) -> None:
        """See `StepLogSink`."""
        if request.seq_id is None:
            self.rejected.append(request)
        else:
            self.requests[request.seq_id] = request

    def add_step(self, step: StepRecord) -> None:
        """See `StepLogSink`."""
        self.steps.append(step)

    def finish_request(self, request: RequestRecord) -> None:
        """See `StepLogSink`."""
        if request.seq_id is not None:
            self.requests[request.seq_id] = request

    @property
    def all_requests(self) -> list[RequestRecord]:
        """Every request that came, the rejected ones last."""
        return [*self.requests.values(), *self.rejected]

    @property
    def end_s(self) -> float:
        """When the last thing in it happened; 0 for an empty log."""
        ends = [r.finished_s for r in self.all_requests if r.finished_s is not None]
        return max([*ends, *(step.done_s for step in self.steps[-1:])], default=0.0)

    def begins_s(self) -> list[float]:
        """When the device began each step: it may have been launched while one before still ran."""
        begins, free_s = [], 0.0
        for step in self.steps:
            begins.append(max(step.launched_s, free_s))
            free_s = step.done_s
        return begins

    def save(self, path: str | PathLike[str]) -> None:
        """Writes it to a file that `read_step_log` reads: requests, steps, then the ends.

        Args:
            path: Where to write; `.gz` at the end of its name packs it.
        """
        with StepLogWriter(path, self.header) as writer:
            for request in self.rejected:
                writer.add_request(request)
            for request in self.requests.values():
                writer.add_request(request)
            for step in self.steps:
                writer.add_step(step)
            for request in self.requests.values():
                if request.finish_reason is not None:
                    writer.finish_request(request)


class BlockTracker:
    """Finds the blocks that sequences have gained from step to step."""

    def __init__(self) -> None:
        """Starts with empty tables."""
        self._num_told: dict[int, int] = {}

    def follow(self, plan: StepPlan) -> dict[int, tuple[int, ...]]:
        """Returns the blocks that each sequence has gained, by `seq_id`; call it for every plan."""
        told = self._num_told
        for seq_id in plan.released:
            told.pop(seq_id, None)
        gained = {}
        batch = plan.sequences
        for place, (seq_id, num_blocks) in enumerate(
            zip(batch.seq_ids, batch.num_blocks, strict=True)
        ):
            position = told.get(seq_id, 0)
            if num_blocks > position:
                gained[seq_id] = tuple(batch.growing_tables[place][position:num_blocks])
                told[seq_id] = num_blocks
        return gained


def record_plan(
    plan: StepPlan,
    *,
    planned_s: float,
    launched_s: float,
    done_s: float,
    new_blocks: Mapping[int, Seq[int]] | None = None,
) -> StepRecord:
    """Makes the record of a plan; keeps nothing of the plan alive.

    Args:
        plan: The plan.
        planned_s: See `StepRecord`, like the others.
        launched_s: See there.
        done_s: See there.
        new_blocks: See there; None to leave blocks out.
    """
    batch = plan.sequences
    return StepRecord(
        plan.step_id,
        planned_s,
        launched_s,
        done_s,
        batch.seq_ids,
        array("I", batch.num_computed_tokens),
        tuple(batch.num_scheduled_tokens),
        plan.sampled_seq_ids,
        plan.preempted,
        tuple([seq.seq_id for seq in plan.dropped]),
        plan.released,
        tuple([(seq_id, reason.value) for seq_id, reason in plan.refused]),
        {} if new_blocks is None else new_blocks,
        plan.num_scheduled_tokens,
        plan.num_hit_tokens,
        plan.num_waiting,
        plan.num_running,
        plan.num_used_blocks,
        plan.num_free_blocks,
        plan.num_cached_blocks,
    )


_REQUEST_FIELDS = tuple(f.name for f in fields(RequestRecord))
_REQUEST_DEFAULTS = {f.name: f.default for f in fields(RequestRecord)}
_END_FIELDS = ("num_cached_tokens", "num_preemptions", "finished_s", "finish_reason", "message")


class StepLogWriter:
    """Writes a log to a file, one event a line."""

    def __init__(self, path: str | PathLike[str], header: LogHeader) -> None:
        """Creates the file, or empties it, and writes the header.

        Args:
            path: Where to write; `.gz` at the end of its name packs it.
            header: See `LogHeader`.

        Raises:
            OSError: The file cannot be written.
        """
        self._file = _open(path, "wt")
        self._write({"format": FORMAT, "version": VERSION, **asdict(header)})

    def add_request(self, request: RequestRecord) -> None:
        """See `StepLogSink`."""
        event = "reject" if request.seq_id is None else "add"
        names = _REQUEST_FIELDS if event == "reject" else _REQUEST_FIELDS[: -len(_END_FIELDS)]
        self._write({"event": event, **_compact(request, names)})

    def add_step(self, step: StepRecord) -> None:
        """See `StepLogSink`. What is as in most steps is left out; see `read_step_log`."""
        line: dict[str, Any] = {"event": "step", **step._asdict()}
        line["computed"] = list(step.computed)
        if step.num_scheduled_tokens == len(step.seq_ids):
            del line["scheduled"]
        if len(step.sampled) == len(step.seq_ids):
            del line["sampled"]
        for name in ("preempted", "dropped", "released", "refused", "new_blocks"):
            if not line[name]:
                del line[name]
        self._write(line)

    def finish_request(self, request: RequestRecord) -> None:
        """See `StepLogSink`."""
        names = ("seq_id", *_END_FIELDS)
        self._write({"event": "finish", **_compact(request, names)})

    def flush(self) -> None:
        """Puts what was written so far into the file."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file; calling it again does nothing."""
        self._file.close()

    def __enter__(self) -> StepLogWriter:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read_step_log(path: str | PathLike[str]) -> StepLog:
    """Reads a log.

    In a `step` line, `scheduled` is left out when every sequence computed one token, `sampled` when
    every one got one, and lists that are empty.

    Args:
        path: A file that a `StepLogWriter` wrote, or is still writing.

    Returns:
        The log.

    Raises:
        StepLogError: It is no step log, or a line cannot be read.
        OSError: The file cannot be read.
    """
    log: StepLog | None = None
    number = 0
    try:
        with _open(path, "rt") as file:
            for number, text in enumerate(file, start=1):
                if log is None:
                    log = StepLog(_read_header(text, path))
                elif text.endswith("\n"):
                    _read_line(log, text, f"{path}, line {number}")
                else:
                    log.is_truncated = True
    except EOFError:  # in the middle of a packed file
        if log is not None:
            log.is_truncated = True
    except (UnicodeDecodeError, zlib.error, gzip.BadGzipFile) as error:
        where = f" behind line {number}" if number else ""
        raise StepLogError(f"{path} is no step log{where}: {error}") from error
    return StepLog(_read_header("", path)) if log is None else log


_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What JSON of anything else raises while it is read as a part of a log."""


def _read_header(text: str, path: str | PathLike[str]) -> LogHeader:
    problem = f"{path} is no step log of version {VERSION}: its first line is {text[:100]!r}"
    try:
        values = json.loads(text)
        is_ours = (values.pop("format"), values.pop("version")) == (FORMAT, VERSION)
        header = LogHeader(**values)
        _check_fields(header)
        check_size("num_blocks", header.num_blocks, most=MAX_NUM_BLOCKS)
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            check_size(name, getattr(header, name))
    except _UNREADABLE as error:
        raise StepLogError(f"{problem} ({error!r})") from error
    if not is_ours:
        raise StepLogError(problem)
    return header


def _read_line(log: StepLog, text: str, where: str) -> None:
    try:
        _read_event(log, json.loads(text))
    except _UNREADABLE as error:
        raise StepLogError(f"{where}: {error!r} in {text[:100]!r}") from error


def _read_event(log: StepLog, line: dict[str, Any]) -> None:
    event = line.pop("event")
    if event == "step":
        step = _read_step(line)
        _check_step(step, log)
        log.add_step(step)
    elif event == "finish":
        request = log.requests[line.pop("seq_id")]
        for name, value in line.items():
            if name not in _END_FIELDS:
                raise ValueError(f"unknown field {name!r}")
            setattr(request, name, value)
        _check_fields(request)
    elif event in ("add", "reject"):
        request = RequestRecord(**{"seq_id": None, **line})
        _check_fields(request)
        log.add_request(request)
    else:
        raise ValueError(f"unknown event {event!r}")


def _read_step(line: dict[str, Any]) -> StepRecord:
    seq_ids = _numbers(line["seq_ids"])
    return StepRecord(
        **{
            **line,
            "seq_ids": seq_ids,
            "computed": array("I", line["computed"]),
            "scheduled": _numbers(line.get("scheduled", (1,) * len(seq_ids))),
            "sampled": _numbers(line.get("sampled", seq_ids)),
            "preempted": _numbers(line.get("preempted", ())),
            "dropped": _numbers(line.get("dropped", ())),
            "released": _numbers(line.get("released", ())),
            "refused": tuple((seq_id, str(reason)) for seq_id, reason in line.get("refused", ())),
            "new_blocks": {
                int(seq_id): _numbers(ids) for seq_id, ids in line.get("new_blocks", {}).items()
            },
        }
    )


def _numbers(values: Iterable[int]) -> tuple[int, ...]:
    """The values, which must be integers of at least 0."""
    return tuple(array("Q", values))


_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "float": (int, float),
    "int": (int,),
    "str": (str,),
    "Mapping[str, Any]": (dict,),
    "None": (type(None),),
}
"""What JSON may have in a field, by its declared type."""


def _declared(record: type[LogHeader | RequestRecord]) -> dict[str, tuple[type, ...]]:
    kinds = {f.name: str(f.type).split(" | ") for f in fields(record)}
    return {name: tuple(t for part in parts for t in _TYPES[part]) for name, parts in kinds.items()}


_FIELDS: dict[type, dict[str, tuple[type, ...]]] = {
    LogHeader: _declared(LogHeader),
    RequestRecord: _declared(RequestRecord),
    StepRecord: {
        name: _TYPES["float" if name.endswith("_s") else "int"]
        for name in StepRecord._fields
        if name == "step_id" or name.endswith("_s") or name.startswith("num_")
    },
}
"""Types of the fields of each record; a step's lists are checked where they are read."""

_MOST = 2**53
"""No count, and no time in seconds, is greater; a float tells integers apart up to here."""

_ANY_NUMBER = ("priority", "max_tokens", "deadline_s")
"""Fields that hold whatever the caller has asked for."""


def _check_fields(record: LogHeader | RequestRecord | StepRecord) -> None:
    """Checks the type of each field, and that numbers are not negative or out of all reason."""
    for name, allowed in _FIELDS[type(record)].items():
        value = getattr(record, name)
        # A bool is an int to Python, and none to us.
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise TypeError(f"{name} is {value!r}")
        if name not in _ANY_NUMBER and isinstance(value, (int, float)) and not 0 <= value <= _MOST:
            raise ValueError(f"{name} is {value!r}")


def _check_step(step: StepRecord, log: StepLog) -> None:
    """Checks that a step fits into its log."""
    _check_fields(step)
    batch = set(step.seq_ids)
    if not len(step.seq_ids) == len(batch) == len(step.computed) == len(step.scheduled):
        raise ValueError("seq_ids, computed and scheduled are not one of each for each sequence")
    if sum(step.scheduled) != step.num_scheduled_tokens:
        raise ValueError(f"num_scheduled_tokens is {step.num_scheduled_tokens!r}")
    refused = {seq_id for seq_id, _ in step.refused}
    unknown = (
        batch.union(step.preempted, step.dropped, step.released, refused) - log.requests.keys()
    )
    if unknown:
        raise ValueError(f"no request has the seq_id {min(unknown)}")
    if not (batch.issuperset(step.sampled) and batch >= step.new_blocks.keys()):
        raise ValueError("sampled and new_blocks name sequences that are not in seq_ids")
    last = max((max(ids, default=0) for ids in step.new_blocks.values()), default=0)
    if last >= log.header.num_blocks:
        raise ValueError(f"new_blocks has block {last} of {log.header.num_blocks}")


def _compact(request: RequestRecord, names: Iterable[str]) -> dict[str, Any]:
    """The named fields, those left out that have their default."""
    values = {name: getattr(request, name) for name in names}
    return {k: v for k, v in values.items() if k == "seq_id" or v != _REQUEST_DEFAULTS[k]}


def _open(path: str | PathLike[str], mode: str) -> IO[str]:
    path = Path(path)
    if path.suffix == ".gz":
        return cast("IO[str]", gzip.open(path, mode, encoding="utf-8"))
    return cast("IO[str]", path.open(mode, encoding="utf-8"))
