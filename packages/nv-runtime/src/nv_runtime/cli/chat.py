"""`nv chat`: a conversation on the terminal."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import click

from nv_core.errors import RequestError
from nv_runtime.cli.answer import stream_answer
from nv_runtime.cli.options import (
    ENGINE_FLAGS,
    SAMPLING_FLAGS,
    chat_options,
    common_options,
    engine_options,
    given,
    sampling_options,
    text_expected,
)

if TYPE_CHECKING:
    from nv_core import SamplingParams
    from nv_runtime.cli.session import ChatModel, CliSession

__all__ = ["chat"]

_HELP = """\
/help   show this
/reset  forget the conversation
/exit   leave (so does Ctrl-D)
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one."""


@click.command(short_help="Talk with a model.")
@click.argument("model")
@click.option("--max-tokens", type=int, help="Most tokens of an answer; to the limit if not given.")
@sampling_options
@chat_options
@engine_options
@common_options
@click.pass_obj
def chat(
    session: CliSession,
    /,
    *,
    model: str,
    max_tokens: int | None,
    system: str | None,
    chat_template: str | None,
    chat_template_kwargs: dict[str, Any] | None,
    **flags: object,
) -> None:
    """Talk with MODEL.

    Answers go to standard output, everything else to standard error. /help lists what can be done
    beside talking.
    """
    with session.load(model, session.engine_options(given(flags, ENGINE_FLAGS))) as llm:
        conversation = _Conversation(
            session,
            llm,
            llm.get_default_sampling_params().clone(
                max_tokens=max_tokens, **given(flags, SAMPLING_FLAGS)
            ),
            system=system,
            template={
                "chat_template": chat_template,
                "chat_template_kwargs": chat_template_kwargs,
            },
        )
        conversation.run()


class _Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(
        self,
        session: CliSession,
        llm: ChatModel,
        params: SamplingParams,
        *,
        system: str | None,
        template: dict[str, Any],
    ) -> None:
        self._session = session
        self._llm = llm
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._template = template

    def run(self) -> None:
        """Reads and answers until the input ends or the user leaves.

        Raises:
            RequestError: The model cannot chat at all, usually for want of a chat template.
        """
        self._llm.render_chat([*self._opening, {"role": "user", "content": "Hi"}], **self._template)
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            _enable_line_editing()
            click.echo("Ctrl-D leaves, /help helps.", err=True)
        while True:
            try:
                line = _read_message(is_terminal=is_terminal)
            except EOFError:
                if is_terminal:
                    click.echo(err=True)
                return
            except KeyboardInterrupt:
                click.echo("\n(Ctrl-D or /exit leaves)", err=True)
                continue
            command = line.strip()
            if command == "/exit":
                return
            if re.fullmatch(r"/\w*", command):
                self._obey(command)
            elif command:
                self._answer(line)

    def _obey(self, command: str) -> None:
        if command == "/reset":
            self._messages = list(self._opening)
            click.echo("(new conversation)", err=True)
        elif command == "/help":
            click.echo(_HELP, err=True)
        else:
            click.echo(f"There is no command {command}; /help lists them.", err=True)

    def _answer(self, text: str) -> None:
        """Answers one message; what cannot be answered leaves the conversation as it was."""
        asked = [*self._messages, {"role": "user", "content": text}]
        try:
            prompt = self._llm.render_chat(asked, **self._template)
            answer = stream_answer(self._llm, prompt, self._params)
        except RequestError as error:
            click.echo(f"nv: {error}", err=True)
            if self._messages != self._opening:
                click.echo("(/reset starts a new conversation)", err=True)
            return
        self._session.note(answer.summary())
        self._messages = [*asked, {"role": "assistant", "content": answer.text}]


def _read_message(*, is_terminal: bool) -> str:
    """Reads one message, of several lines where a line ends in a backslash.

    Raises:
        EOFError: The input has ended.
        RequestError: It is no text.
    """
    lines: list[str] = []
    while True:
        # Prompts would stand between the answers where the output is a file.
        with text_expected("standard input"):
            line = input(("... " if lines else "> ") if is_terminal else "")
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _enable_line_editing() -> None:
    try:
        # Importing it is what gives `input` its history and editing keys.
        import readline  # noqa: F401
    except ImportError:
        return
