"""`nv generate`: completes one prompt, or answers one question."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

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
    from nv_runtime.cli.session import CliSession
    from nv_runtime.prompt import Prompt

__all__ = ["generate"]


@click.command(short_help="Complete a prompt, or answer one question.")
@click.argument("model")
@click.argument("prompt", required=False)
@click.option(
    "--chat/--no-chat",
    "as_chat",
    default=None,
    help="Put the prompt into the model's chat template, as a question; a flag of conversations "
    "does so too.",
)
@click.option("--max-tokens", type=int, default=256, show_default=True, help="Most tokens.")
@sampling_options
@chat_options
@engine_options
@common_options
@click.pass_obj
def generate(
    session: CliSession,
    /,
    *,
    model: str,
    prompt: str | None,
    as_chat: bool | None,
    max_tokens: int,
    system: str | None,
    chat_template: str | None,
    chat_template_kwargs: dict[str, Any] | None,
    **flags: object,
) -> int:
    """Complete PROMPT with MODEL; without PROMPT, or with -, read it from standard input.

    The text goes to standard output as it is generated, statistics go to standard error.
    """
    chat_flags = {
        "--system": system,
        "--chat-template": chat_template,
        "--chat-template-kwargs": chat_template_kwargs,
    }
    used = [name for name, value in chat_flags.items() if value is not None]
    if used and as_chat is False:
        raise click.UsageError(
            f"{', '.join(used)} means nothing with --no-chat: no template is used; leave one out."
        )
    text = _read_prompt(prompt)
    with session.load(model, session.engine_options(given(flags, ENGINE_FLAGS))) as llm:
        params = llm.get_default_sampling_params().clone(
            max_tokens=max_tokens, **given(flags, SAMPLING_FLAGS)
        )
        request: Prompt = text
        if as_chat or used:
            messages = [] if system is None else [{"role": "system", "content": system}]
            request = llm.render_chat(
                [*messages, {"role": "user", "content": text}],
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
            )
        answer = stream_answer(llm, request, params)
    session.note(answer.summary())
    if answer.finish_reason is None:
        raise click.Abort
    return 0


def _read_prompt(prompt: str | None) -> str:
    if prompt not in (None, "-"):
        return str(prompt)
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError(
            "Missing PROMPT: write it behind MODEL, or pipe it in: echo Hello | nv generate MODEL"
        )
    # `echo` ends its line; the model should not read that as the end of a paragraph.
    with text_expected("standard input"):
        return sys.stdin.read().removesuffix("\n")
