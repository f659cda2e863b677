"""Conversations: from messages to a prompt, for `LLM` and `AsyncLLM` alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nv_core import NvError, RequestError
from nv_runtime.prompt import TokensPrompt

if TYPE_CHECKING:
    from nv_runtime.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""One turn of a conversation: `{"role": ..., "content": ...}`."""


def split_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """Tells one conversation from a list of them.

    Raises:
        RequestError: It is neither.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(
            "messages must be a list of messages, or a list of such lists, got "
            f"{type(messages).__name__}"
        )
    if not messages:
        raise RequestError("messages is empty; a conversation needs at least one message")
    if isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def render_conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> TokensPrompt:
    """Renders one conversation into a prompt.

    Args:
        tokenizer: The model's tokenizer, with its template.
        messages: The conversation.
        chat_template: A Jinja template to use instead of the model's.
        add_generation_prompt: Whether the rendered text ends by opening the answer.
        continue_final_message: Whether the answer goes on in the last message instead.
        tools: Descriptions of tools for the template.
        chat_template_kwargs: Further variables of the template, such as `enable_thinking`. As in
            vLLM, what it says goes before the arguments of the same name.

    Returns:
        The prompt's text and tokens. The template has written every special token already, so the
        tokenizer adds none.

    Raises:
        RequestError: The conversation cannot be rendered.
    """
    arguments: dict[str, Any] = {
        "chat_template": chat_template,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "tools": tools,
    }
    try:
        arguments.update(chat_template_kwargs or {})
        text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    except (TypeError, ValueError) as error:
        if isinstance(error, NvError):
            raise
        raise RequestError(
            f"chat_template_kwargs must be a dict of variables of the template: {error}"
        ) from error
    return {
        "prompt": text,
        "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False),
    }
