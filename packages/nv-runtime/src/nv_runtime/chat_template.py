"""Renders conversations with a model's Jinja chat template, as Hugging Face renders it.

Templates are programs that arrive with a checkpoint, so they run in Jinja's immutable sandbox and
see plain data only: text, numbers, lists and dicts. The names they may use are those that
published templates expect: `messages`, `tools`, `documents`, `add_generation_prompt`, the special
tokens, `raise_exception`, `strftime_now`, a `tojson` that leaves text readable, `break` and
`continue`, and the `{% generation %}` block.

This module knows nothing of files or token ids; `nv_runtime.tokenizer` finds the templates and
encodes what is rendered here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nv_core.errors import ConfigError, RequestError

__all__ = ["ChatTemplates"]

# A private-use pair that no message contains by accident. The space after it tells whether the
# template trimmed the message.
_END_OF_MESSAGE = "\ue0f1\ue0f2"
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


_FAILURES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)
"""What the code of a template raises besides Jinja's own errors; endless recursion is the last."""


class ChatTemplates:
    """The chat templates of one model: usually one, sometimes several with names.

    Args:
        sources: Jinja source by name. `"default"` is used unless a request names another or has
            tools and there is a `"tool_use"` template.
        special_tokens: Text by name (`bos_token`, `eos_token`, ...), put into every template's
            context.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._environment = _make_environment()
        self._compiled: dict[str, _CompiledTemplate] = {}

    @property
    def default(self) -> str | None:
        """Source of the template used when a request asks for nothing else; None if absent."""
        return self._sources.get("default")

    def source(self, chat_template: str | None, *, has_tools: bool) -> str:
        """Picks the template of a request.

        Args:
            chat_template: A template's name, its whole source, or None for the model's own.
            has_tools: Whether the request carries tools.

        Raises:
            RequestError: The model has no template, or none that is the default.
        """
        if chat_template is not None:
            if not isinstance(chat_template, str):
                raise RequestError(
                    "chat_template must be a template's name or its source, got "
                    f"{type(chat_template).__name__}"
                )
            return self._sources.get(chat_template, chat_template)
        if has_tools and "tool_use" in self._sources:
            return self._sources["tool_use"]
        if "default" in self._sources:
            return self._sources["default"]
        if self._sources:
            raise RequestError(
                "chat_template: the model has several chat templates and no default one; pass one "
                f"of the names {sorted(self._sources)} or a template as chat_template."
            )
        raise RequestError(
            "chat_template: the model has no chat template, so it is probably not a chat model; "
            "pass a Jinja template as chat_template, or use generate() with a plain prompt."
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Renders one conversation to the text that the model reads.

        Args:
            messages: Dicts with a `role` and usually a `content` (text, or a list of text parts).
                Left unchanged; keys whose value is None count as absent. What an assistant only
                called tools with needs no content.
            add_generation_prompt: Whether the text ends with the opening of an assistant message.
            continue_final_message: Whether the text ends inside the last message, which the model
                then carries on; excludes `add_generation_prompt`.
            tools: JSON schemas of the tools that the model may call.
            documents: Texts that the model may quote.
            chat_template: A template's name or source; None takes the model's own.
            variables: Further variables of the template, such as `enable_thinking`.

        Raises:
            RequestError: The model has no template, or the template refuses the messages.
            ConfigError: The template is no valid Jinja.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message=True and add_generation_prompt=True exclude each other: "
                "the first carries on the last message, the second opens a new one."
            )
        template = self._compile(self.source(chat_template, has_tools=tools is not None))
        try:
            chat = _plain_messages(messages, joins_parts=not template.reads_content_parts)
            context = {
                **self._special_tokens,
                "documents": None if documents is None else _plain(documents, "documents"),
                **{name: _plain(value, name) for name, value in (variables or {}).items()},
                "messages": chat,
                "tools": None if tools is None else _plain_tools(tools),
                "add_generation_prompt": add_generation_prompt,
            }
        except RecursionError as error:
            raise RequestError(
                "messages, or what goes with them, hold lists or dicts within each other without "
                "end, or too deeply; pass plain data."
            ) from error
        if not continue_final_message:
            return _render_with_silent_turns(template, context, chat)
        _mark_end(chat[-1])
        return _cut_at_mark(template.render(context))

    def _compile(self, source: str) -> _CompiledTemplate:
        compiled = self._compiled.get(source)
        if compiled is None:
            compiled = _CompiledTemplate(self._environment, source)
            # Requests may bring templates of their own: keep a few, not all there ever were.
            if len(self._compiled) >= 16:
                self._compiled.clear()
            self._compiled[source] = compiled
        return compiled


def _render_with_silent_turns(
    template: _CompiledTemplate, context: Mapping[str, Any], chat: list[dict[str, Any]]
) -> str:
    """Renders a conversation whose assistant may have said nothing, beside its tool calls.

    A template is shown first what transformers shows it, no content at all. One that cannot do
    without gets empty text, in place.
    """
    silent = [m for m in chat if m.get("role") == "assistant" and "content" not in m]
    try:
        return template.render(context)
    except RequestError:
        if not silent:
            raise
    for message in silent:
        message["content"] = ""
    return template.render(context)


class _CompiledTemplate:
    """One parsed template, and whether it reads message contents part by part."""

    def __init__(self, environment: jinja2.Environment, source: str) -> None:
        try:
            self.reads_content_parts = _loops_over_content(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"chat_template: line {error.lineno} is no valid Jinja: {error.message}. "
                "Correct the template, or pass another one as chat_template."
            ) from error
        except RecursionError as error:
            raise ConfigError(
                "chat_template: its expressions or blocks are nested too deeply; pass another one."
            ) from error

    def render(self, context: Mapping[str, Any]) -> str:
        try:
            return self._template.render(context)
        except jinja2.UndefinedError as error:
            raise RequestError(
                f"messages: the model's chat template refused them: {error} (keys whose value is "
                "None count as absent)"
            ) from error
        except jinja2.TemplateError as error:
            raise RequestError(
                f"messages: the model's chat template refused them: {error}"
            ) from error
        except _FAILURES as error:
            raise RequestError(
                "messages: the model's chat template failed on them with "
                f"{type(error).__name__}: {error}. Compare the keys and types of the messages with "
                "what the template reads."
            ) from error


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts `{% generation %}...{% endgeneration %}`, which marks assistant text for training."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads this class attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Keeps the block's body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass these by position too
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Replaces Jinja's own filter, which escapes `<`, `>`, `&` and `'` for web pages."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _plain_messages(
    messages: Sequence[Mapping[str, Any]], *, joins_parts: bool
) -> list[dict[str, Any]]:
    """Copies the messages into plain data.

    Args:
        messages: The caller's messages.
        joins_parts: Whether a list of text parts becomes one text, for templates that print
            contents without looking at parts.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages must be a list of dicts with role and content, got {type(messages).__name__}"
        )
    if not messages:
        raise RequestError("messages is empty; pass at least one message.")
    chat = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        plain = _plain(message, where)
        if not isinstance(plain, dict):
            raise RequestError(
                f"{where} must be a dict with role and content, got {type(message).__name__}"
            )
        # Clients send `content: null` beside tool calls, which many templates would print.
        present = {key: value for key, value in plain.items() if value is not None}
        if joins_parts and isinstance(present.get("content"), list):
            present["content"] = _join_parts(present["content"], f"{where}['content']")
        chat.append(_with_reasoning_names(present))
    return chat


def _join_parts(parts: list[Any], where: str) -> str:
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise RequestError(
                f"{where} has a part that is no text: {part!r}; this engine serves text models, so "
                "pass text, or parts of the form {'type': 'text', 'text': ...}."
            )
        texts.append(text)
    return "\n".join(texts)


def _with_reasoning_names(message: dict[str, Any]) -> dict[str, Any]:
    """Offers a message's reasoning under the names that templates and servers have given it."""
    reasoning = next((message[key] for key in _REASONING_KEYS if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain_tools(tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise RequestError(
            f"tools must be a list of JSON schemas (dicts), got {type(tools).__name__}"
        )
    return [_plain(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _plain(value: Any, where: str) -> Any:  # noqa: ANN401 - JSON data has no narrower type here
    """Copies a value into text, numbers, lists and dicts, all that a template may touch.

    Raises:
        RequestError: The value is something else; objects have methods which a template, code
            from the network, must not reach.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    # Members of enumerations and other subclasses bring methods of their own.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {
            _plain(key, where): _plain(item, f"{where}[{key!r}]") for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _plain(fields, where)
    dump: Callable[[], object] | None = getattr(value, "model_dump", None)
    if callable(dump):
        return _plain(dump(), where)
    raise RequestError(
        f"{where} is a {type(value).__name__}; chat templates take text, numbers, lists and dicts "
        "(a tool is its JSON schema)."
    )


def _mark_end(message: dict[str, Any]) -> None:
    """Appends the end mark to a message's text, in place."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _END_OF_MESSAGE + " "
        return
    parts = content if isinstance(content, list) else []
    for part in reversed(parts):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += _END_OF_MESSAGE + " "
            return
    raise RequestError(
        "continue_final_message=True, but the last message has no text content to carry on."
    )


def _cut_at_mark(rendered: str) -> str:
    end = rendered.rfind(_END_OF_MESSAGE)
    if end < 0:
        raise RequestError(
            "continue_final_message=True, but the chat template does not print the last message's "
            "content; end the conversation with a message that it prints."
        )
    was_trimmed = not rendered.startswith(_END_OF_MESSAGE + " ", end)
    text = rendered[:end]
    return text.rstrip() if was_trimmed else text


def _loops_over_content(template: jinja2.nodes.Template) -> bool:
    """Whether a template goes through the parts of a message's content.

    Templates that do not are given one text, since they would print the list itself or nothing.
    """
    names = {"content"} | set(_content_aliases(template))
    return any(_is_content(loop.iter, names) for loop in template.find_all(jinja2.nodes.For))


def _content_aliases(template: jinja2.nodes.Template) -> Iterator[str]:
    for assignment in template.find_all(jinja2.nodes.Assign):
        if isinstance(assignment.target, jinja2.nodes.Name) and _is_content(assignment.node, set()):
            yield assignment.target.name


def _is_content(node: jinja2.nodes.Node | None, names: set[str]) -> bool:
    """Whether an expression is `message.content`, perhaps filtered, or one of `names`."""
    if isinstance(node, jinja2.nodes.Filter):
        return _is_content(node.node, names)
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    return isinstance(node, jinja2.nodes.Name) and node.name in names
