"""CliSession: what one run of `nv` carries from the command line to its commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import click

if TYPE_CHECKING:
    from types import TracebackType

    from nv_core import SamplingParams
    from nv_runtime.outputs import RequestOutput
    from nv_runtime.prompt import Prompt

__all__ = ["ChatModel", "CliSession", "load_llm"]


class ChatModel(Protocol):
    """The part of `nv_runtime.LLM` that commands use."""

    def stream(
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | None = None,
    ) -> Iterator[RequestOutput]:
        """Yields cumulative outputs; closing the iterator aborts the request."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Renders a conversation into a prompt."""

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the model's own sampling defaults."""

    def __enter__(self) -> ChatModel: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


@dataclass
class CliSession:
    """Settings that hold for the whole run.

    Args:
        load: Loads a model: (its name, the options given on the command line).
        debug: Whether errors show their traceback.
        verbose: Whether the engine's log is shown.
        quiet: Whether progress and statistics are left out.
    """

    load: Callable[[str, Mapping[str, Any]], ChatModel]
    debug: bool = False
    verbose: bool = False
    quiet: bool = False

    def engine_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options of `LLM`: those on the command line, and whether to show progress."""
        return {**given, "show_progress": not self.quiet and sys.stderr.isatty()}

    def note(self, text: str) -> None:
        """Writes a line of statistics to standard error, unless the run is quiet."""
        if not self.quiet:
            click.echo(click.style(text, dim=True), err=True)


def load_llm(model: str, options: Mapping[str, Any]) -> ChatModel:
    """Loads a model with `nv_runtime.LLM`."""
    # Imported here: it brings torch, which takes seconds.
    from nv_runtime import LLM

    return LLM(model, **options)
