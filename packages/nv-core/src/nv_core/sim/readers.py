"""Readers: public traces and plain files as workloads.

Every reader keeps the lines that it understands and reports the others, with their numbers and what
is wrong, in `Workload.problems`: nothing is dropped silently. `read_workload` finds out the format
from the first line.
"""

from __future__ import annotations

import csv
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import IO, Any

from nv_core.errors import ConfigError
from nv_core.sim.workload import UNIQUE_BASE, Workload, WorkRequest, workload_of

TokenCounter = Callable[[str], int]
"""Returns the number of tokens of a text."""

_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(?:\+00:?00|Z)?")


_OTHER_BYTES = re.compile("[\udc80-\udcff]")
"""What Python makes of bytes that are no UTF-8, see `_open`."""


class _SkippedError(ValueError):
    """A line that is left out, and why."""


def estimate_tokens(text: str) -> int:
    """Guesses the number of tokens of a text: a token is four characters, roughly, in English."""
    return max(1, round(len(text) / 4))


def read_workload(path: str | PathLike[str], file_format: str = "auto", **options: Any) -> Workload:  # noqa: ANN401 - those of the reader
    """Reads a file of requests.

    Args:
        path: The file.
        file_format: One of `READERS`, or "auto" to find it out from the first line.
        options: Those of the reader of that format.

    Raises:
        ConfigError: The format is unknown or cannot be told, or no line could be read.
        OSError: The file cannot be read.
    """
    path = Path(path)
    name = detect_format(path) if file_format == "auto" else file_format
    if name not in READERS:
        raise ConfigError(f"file_format must be one of auto, {', '.join(READERS)}, got {name!r}")
    workload = READERS[name](path, **options)
    if not workload.requests:
        problems = "; ".join(workload.problems[:3]) or "it is empty"
        raise ConfigError(f"{path} holds no request that can be read as {name}: {problems}")
    return workload


def detect_format(path: Path) -> str:
    """Tells the format of a file from its first line.

    Raises:
        ConfigError: It looks like none of `READERS`.
    """
    with _open(path) as file:
        first = file.readline().strip()
    if first.startswith("["):
        return "sharegpt"
    if first.startswith("{"):
        try:
            keys = set(json.loads(first))
        except (ValueError, RecursionError):
            keys = set()
        if "chat_id" in keys:
            return "bailian"
        if "hash_ids" in keys:
            return "mooncake"
        if "prompt" in keys:
            return "vllm"
    columns = {column.strip() for column in first.split(",")}
    for name, needed in (("azure", _AZURE), ("burstgpt", _BURSTGPT), *_PLAIN_NAMES):
        if set(needed) <= columns:
            return name
    raise ConfigError(
        f"the format of {path} cannot be told from its first line, {first[:80]!r}; pass "
        f"file_format, one of {', '.join(READERS)}"
    )


_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(path: Path) -> Workload:
    """Reads an Azure LLM inference trace, 2023 or 2024.

    Its times have seven, six or no digits behind the second, with or without a zone.
    """

    def parse(row: Mapping[str, str]) -> WorkRequest:
        return WorkRequest(
            parse_timestamp(row["TIMESTAMP"]),
            _count(row["ContextTokens"]),
            _count(row["GeneratedTokens"]),
        )

    return _collect(path, _csv_rows(path, _AZURE), parse)


_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


def read_burstgpt(path: Path) -> Workload:
    """Reads BurstGPT; requests that failed (no response tokens) are reported and left out."""

    def parse(row: Mapping[str, str]) -> WorkRequest:
        if _count(row["Response tokens"], least=0) == 0:
            raise _SkippedError("a failed request: no response tokens")
        return WorkRequest(
            float(row["Timestamp"]),
            _count(row["Request tokens"]),
            _count(row["Response tokens"]),
            user=row.get("Session ID") or None,
        )

    return _collect(path, _csv_rows(path, _BURSTGPT), parse)


_OURS = ("arrival_s", "num_prompt_tokens", "num_output_tokens")
_VIDUR = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
_PLAIN_NAMES = (("csv", _OURS), ("csv", _VIDUR))


def read_csv(path: Path) -> Workload:
    """Reads a table with the columns arrival_s, num_prompt_tokens and num_output_tokens.

    user, priority, slack_s and predicted_output_tokens may follow. Vidur's names (arrived_at,
    num_prefill_tokens, num_decode_tokens) are understood as well.
    """
    with _open(path) as file:
        columns = file.readline().strip().split(",")
    names = _VIDUR if _VIDUR[0] in columns else _OURS

    def parse(row: Mapping[str, str]) -> WorkRequest:
        predicted = row.get("predicted_output_tokens")
        slack = row.get("slack_s")
        return WorkRequest(
            float(row[names[0]]),
            _count(row[names[1]]),
            _count(row[names[2]]),
            user=row.get("user") or None,
            priority=int(row.get("priority") or 0),
            slack_s=float(slack) if slack else None,
            predicted_output_tokens=_count(predicted, least=0) if predicted else None,
        )

    return _collect(path, _csv_rows(path, names), parse)


def read_mooncake(path: Path, *, block_size: int = 512, spread_s: float = 0.0) -> Workload:
    """Reads a Mooncake trace; requests share the prefixes that its block hashes share.

    Args:
        path: The file.
        block_size: Tokens per hash. Where the scheduler's block size divides it, hits are those of
            the trace.
        spread_s: Arrivals come in ticks; each request is put off by a random part of this time.
    """
    draw = random.Random(0)

    def parse(line: Mapping[str, Any]) -> WorkRequest:
        return WorkRequest(
            float(line["timestamp"]) / 1000 + spread_s * draw.random(),
            _count(line["input_length"]),
            _count(line["output_length"]),
            segments=_segments(line, block_size),
        )

    return _collect(path, _json_lines(path), parse)


def read_bailian(path: Path, *, block_size: int = 16) -> Workload:
    """Reads a Qwen-Bailian trace; each conversation is a user.

    Args:
        path: The file.
        block_size: Tokens per hash.
    """
    roots: dict[int, int] = {}

    def parse(line: Mapping[str, Any]) -> WorkRequest:
        chat, parent = int(line["chat_id"]), int(line["parent_chat_id"])
        roots[chat] = roots.get(parent, chat if parent < 0 else parent)
        return WorkRequest(
            float(line["timestamp"]),
            _count(line["input_length"]),
            _count(line["output_length"]),
            segments=_segments(line, block_size),
            user=str(roots[chat]),
        )

    return _collect(path, _json_lines(path), parse)


def read_sharegpt(
    path: Path,
    *,
    rate_per_s: float = float("inf"),
    count_tokens: TokenCounter = estimate_tokens,
    seed: int = 0,
) -> Workload:
    """Reads the lengths of ShareGPT: the first message is the prompt, the second the answer.

    As in vLLM's benchmark, prompts beyond 1,024 tokens, conversations beyond 2,048 and messages
    under 4 are left out (and reported).

    Args:
        path: The file.
        rate_per_s: Poisson arrivals at this rate; infinity lets all come at once.
        count_tokens: Counts the tokens of a text; pass a tokenizer's for true lengths.
        seed: Of the arrivals.
    """

    def parse(item: Mapping[str, Any]) -> WorkRequest:
        turns = item["conversations"]
        if len(turns) < 2:
            raise _SkippedError("fewer than two messages")
        prompt, answer = (count_tokens(turn["value"]) for turn in turns[:2])
        if prompt < 4 or answer < 4:
            raise _SkippedError(f"too short: {prompt} and {answer} tokens")
        if prompt > 1024 or prompt + answer > 2048:
            raise _SkippedError(f"too long: {prompt} and {answer} tokens")
        return WorkRequest(0.0, prompt, answer)

    try:
        items = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if not isinstance(items, list):
        raise ConfigError(f"{path} must hold a list of conversations")
    return _arriving(_collect(path, enumerate(items, start=1), parse, "item"), rate_per_s, seed)


def read_vllm(
    path: Path,
    *,
    num_output_tokens: int = 128,
    rate_per_s: float = float("inf"),
    count_tokens: TokenCounter = estimate_tokens,
    seed: int = 0,
) -> Workload:
    """Reads the custom data set of vLLM's benchmark: lines with a `prompt`.

    Args:
        path: The file.
        num_output_tokens: Length of answers where a line has no `output_tokens`.
        rate_per_s: Poisson arrivals at this rate; infinity lets all come at once.
        count_tokens: Counts the tokens of a text; pass a tokenizer's for true lengths.
        seed: Of the arrivals.
    """

    def parse(line: Mapping[str, Any]) -> WorkRequest:
        prompt = line["prompt"]
        if not isinstance(prompt, str):
            raise _SkippedError(f"prompt must be a text, got {prompt!r}")
        answer = line.get("output_tokens", line.get("output_len", num_output_tokens))
        return WorkRequest(0.0, count_tokens(prompt), _count(answer))

    return _arriving(_collect(path, _json_lines(path), parse), rate_per_s, seed)


READERS: dict[str, Callable[..., Workload]] = {
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "mooncake": read_mooncake,
    "bailian": read_bailian,
    "sharegpt": read_sharegpt,
    "vllm": read_vllm,
    "csv": read_csv,
}
"""Readers by the name of their format."""


def parse_timestamp(text: str) -> float:
    """Reads a time of the Azure traces, as seconds since 1970 in UTC.

    Raises:
        ValueError: It is none.
    """
    match = _TIMESTAMP.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no time")
    whole, fraction = match.groups()
    moment = datetime.fromisoformat(whole).replace(tzinfo=timezone.utc)
    return moment.timestamp() + float(fraction or 0)


def _collect(
    path: Path,
    rows: Iterable[tuple[int, Any]],
    parse: Callable[[Any], WorkRequest],
    unit: str = "line",
) -> Workload:
    requests, problems = [], []
    for number, row in rows:
        try:
            if isinstance(row, Exception):
                raise row
            requests.append(parse(row))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            detail = f"no {error}" if isinstance(error, KeyError) else str(error)
            problems.append(f"{unit} {number}: {detail}")
    return workload_of(path.name, requests, problems)


def _csv_rows(path: Path, needed: tuple[str, ...]) -> Iterator[tuple[int, Any]]:
    with _open(path) as file:
        reader = csv.DictReader(file)
        try:
            columns = reader.fieldnames or ()
        except csv.Error as error:
            raise ConfigError(f"{path} is no table: {error}") from error
        missing = [name for name in needed if name not in columns]
        if missing:
            raise ConfigError(f"{path} has no column {', '.join(missing)}")
        while True:
            try:
                row = next(reader, None)
            except csv.Error as error:
                yield reader.reader.line_num, _SkippedError(f"no row of a table: {error}")
                continue
            if row is None:
                return
            if None in row or None in row.values():
                yield reader.line_num, _SkippedError(f"{len(columns)} columns expected")
            elif any(_has_other_bytes(text) for text in row.values()):
                yield reader.line_num, _SkippedError("no UTF-8")
            else:
                yield reader.line_num, row


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with _open(path) as file:
        for number, text in enumerate(file, start=1):
            if _has_other_bytes(text):
                yield number, _SkippedError("no UTF-8")
            elif text.strip():
                try:
                    yield number, json.loads(text)
                except (ValueError, RecursionError) as error:
                    yield number, _SkippedError(f"no JSON: {error}")


def _open(path: Path) -> IO[str]:
    """Opens a text; bytes that are no UTF-8 are kept, so that only their line is lost."""
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline="")


def _has_other_bytes(text: str) -> bool:
    return _OTHER_BYTES.search(text) is not None


def _count(value: Any, *, least: int = 1) -> int:  # noqa: ANN401 - checked right here
    number = float(value)
    is_whole = isfinite(number) and number == int(number)
    if not is_whole or number < least or isinstance(value, bool):
        raise ValueError(f"{value!r} is no number of tokens of at least {least}")
    return int(number)


def _segments(line: Mapping[str, Any], block_size: int) -> tuple[tuple[int, int], ...]:
    ids = [int(number) for number in line["hash_ids"]]
    length = _count(line["input_length"])
    if len(ids) != -(-length // block_size):
        raise _SkippedError(f"{len(ids)} hashes for {length} tokens in blocks of {block_size}")
    if ids and not 0 <= min(ids) <= max(ids) < UNIQUE_BASE:
        raise _SkippedError("hash_ids must be in [0, 2**31)")
    return tuple((number, block_size) for number in ids)


def _arriving(workload: Workload, rate_per_s: float, seed: int) -> Workload:
    """Gives requests that have no time of their own Poisson arrivals."""
    if not rate_per_s > 0:
        raise ConfigError(f"rate_per_s must be positive, got {rate_per_s!r}")
    if rate_per_s == float("inf"):
        return workload
    # Here, since it needs this module's types.
    from nv_core.sim.synthetic import poisson_arrivals, with_arrivals

    return with_arrivals(workload, poisson_arrivals(rate_per_s, seed=seed))
