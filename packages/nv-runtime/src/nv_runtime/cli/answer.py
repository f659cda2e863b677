"""Shows one answer as it grows, counts its tokens, and lets Ctrl-C stop it."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from nv_runtime.interrupts import PatientHandler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType

    from nv_core import SamplingParams
    from nv_runtime.cli.session import ChatModel
    from nv_runtime.outputs import RequestOutput
    from nv_runtime.prompt import Prompt

__all__ = ["Answer", "Interrupts", "stream_answer"]


@dataclass
class Answer:
    """One answer and how it came.

    Args:
        text: The text, as far as it came.
        num_prompt_tokens: Tokens of the prompt.
        num_cached_tokens: Those of them that the prefix cache had.
        num_tokens: Tokens of the answer.
        finish_reason: Why it ended; None if Ctrl-C stopped it.
        time_to_first_token_s: Seconds from the request to the first token; None without one.
        duration_s: Seconds from the request to the end.
    """

    text: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    finish_reason: str | None = None
    time_to_first_token_s: float | None = None
    duration_s: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Rate of the tokens after the first, whose time is the prompt's; None without any."""
        if self.time_to_first_token_s is None or self.num_tokens < 2:
            return None
        elapsed = self.duration_s - self.time_to_first_token_s
        return (self.num_tokens - 1) / elapsed if elapsed > 0 else None

    def summary(self) -> str:
        """Describes the answer in one line."""
        cached = f" ({self.num_cached_tokens} cached)" if self.num_cached_tokens else ""
        parts = [f"{self.num_prompt_tokens} prompt tokens{cached}"]
        parts.append(f"{self.num_tokens} tokens in {self.duration_s:.2f} s")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if self.time_to_first_token_s is not None:
            parts.append(f"first token after {self.time_to_first_token_s:.2f} s")
        if self.finish_reason is None:
            parts.append("stopped by Ctrl-C")
        elif self.finish_reason == "length":
            parts.append("stopped at the length limit")
        return ", ".join(parts)


class Interrupts(PatientHandler):
    """Turns Ctrl-C into a wish that is looked at between tokens.

    An exception in the middle of a step could leave the engine half way. For those who do not want
    to wait for the end of a long step, a third Ctrl-C raises `KeyboardInterrupt` all the same.
    """

    def __init__(self) -> None:
        self._count = 0

    @property
    def requested(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._count > 0

    def __enter__(self) -> Interrupts:
        # Python delivers signals to the main thread only, and lets only it change handlers.
        self._is_active = threading.current_thread() is threading.main_thread()
        if self._is_active:
            self._previous = signal.signal(signal.SIGINT, self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_active:
            signal.signal(signal.SIGINT, self._previous)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Counts, and tells what one more would do."""
        self._count += 1
        if self._count == 2:
            click.echo("\n(stops after this step; once more to leave at once)", err=True)
        if self._count > 2:
            raise KeyboardInterrupt


def stream_answer(
    llm: ChatModel,
    prompt: Prompt,
    sampling_params: SamplingParams,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Answer:
    """Writes an answer to standard output while it is generated.

    Args:
        llm: The model.
        prompt: What to answer.
        sampling_params: How.
        clock: Tells the time in seconds.

    Returns:
        The answer. If Ctrl-C stopped it, the request is aborted and `finish_reason` is None.
    """
    answer = Answer()
    start = clock()
    with Interrupts() as interrupts:
        outputs = llm.stream(prompt, sampling_params)
        try:
            for output in outputs:
                _take(answer, output, elapsed_s=clock() - start)
                if interrupts.requested:
                    break
        finally:
            _close(outputs)
    answer.duration_s = clock() - start
    if not answer.text.endswith("\n"):
        click.echo()
    return answer


def _take(answer: Answer, output: RequestOutput, *, elapsed_s: float) -> None:
    """Writes what is new in a cumulative output, and notes it."""
    completion = output.outputs[0]
    click.echo(completion.text[len(answer.text) :], nl=False)
    answer.text = completion.text
    answer.num_prompt_tokens = len(output.prompt_token_ids)
    answer.num_cached_tokens = output.num_cached_tokens or 0
    answer.num_tokens = len(completion.token_ids)
    answer.finish_reason = completion.finish_reason
    if answer.time_to_first_token_s is None and answer.num_tokens:
        answer.time_to_first_token_s = elapsed_s


def _close(outputs: Iterator[RequestOutput]) -> None:
    close: Callable[[], None] | None = getattr(outputs, "close", None)
    if close is not None:
        close()
