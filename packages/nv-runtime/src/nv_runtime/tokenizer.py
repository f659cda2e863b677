"""Text to token ids and back, for the tokenizer that comes with a checkpoint.

The tokenizer is read straight from the checkpoint's files with the `tokenizers` library:
tokenizer.json defines it completely, tokenizer_config.json adds the names of the special tokens
and the chat template. Ids equal those of transformers' `AutoTokenizer` for the same directory.
Where transformers rebuilds a tokenizer by its class name instead of reading tokenizer.json (it
does so for some classes), the file is what is followed here: it is what the model was published
with.

Read `nv_runtime.chat_template` for conversations, `nv_runtime.detokenizer` for streams and
`nv_runtime.gguf_tokenizer` for tokenizers that come inside a GGUF file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import tokenizers

from nv_core.errors import ConfigError, RequestError
from nv_runtime.chat_template import ChatTemplates
from nv_runtime.detokenizer import StreamDecoder, TokenBytes
from nv_runtime.gguf_tokenizer import build_gguf_tokenizer

if TYPE_CHECKING:
    from nv_models import Checkpoint

__all__ = ["Tokenizer", "load_tokenizer", "load_tokenizer_from_directory"]

_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

_TENSOR_ARGUMENTS = (
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "padding",
    "truncation",
    "max_length",
    "tokenizer_kwargs",
)
"""Arguments of transformers' `apply_chat_template` that shape batches of tensors."""


class Tokenizer:
    """Encodes text, decodes tokens and renders conversations for one model.

    Args:
        backend: The tokenizer itself; it is used as it is, post-processor included.
        special_tokens: The text of the named special tokens (`bos_token`, `eos_token`, ...).
        eos_token_ids: The tokens that end a text, as far as the tokenizer knows them; the first
            is the one it names `eos_token`.
        chat_templates: Jinja sources by name; empty for a model without one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._token_bytes = TokenBytes(backend)
        self._special_tokens = dict(special_tokens or {})
        self._eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self._chat_templates = ChatTemplates(chat_templates or {}, self._special_tokens)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers` object underneath."""
        return self._backend

    @cached_property
    def vocab_size(self) -> int:
        """The largest token id plus one; the model's own vocabulary may be padded beyond it."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Text of the named special tokens (`bos_token`, `eos_token`, ...)."""
        return dict(self._special_tokens)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of all tokens that `skip_special_tokens` leaves out."""
        return self._token_bytes.special_ids

    @property
    def bos_token_id(self) -> int | None:
        """The token that opens a text; None if the tokenizer has none."""
        bos = self._special_tokens.get("bos_token")
        return None if bos is None else self._backend.token_to_id(bos)

    @property
    def eos_token_id(self) -> int | None:
        """The token that the tokenizer names as the end of a text; None if it names none."""
        return self._eos_token_ids[0] if self._eos_token_ids else None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All end tokens that the tokenizer itself knows; a model's configs may add others."""
        return self._eos_token_ids

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template; None if the model has none."""
        return self._chat_templates.default

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text.

        Args:
            text: The text. Special tokens written out in it become those tokens.
            add_special_tokens: Whether the tokenizer's own frame (usually a BOS token, if the
                model wants one) is added. Text from a chat template has it already.

        Raises:
            RequestError: The text is no string, or holds a lone surrogate, which no token spells.
        """
        if not isinstance(text, str):
            raise RequestError(f"prompt must be a string, got {type(text).__name__}")
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            place = next(i for i, character in enumerate(text) if 0xD800 <= ord(character) < 0xE000)
            raise RequestError(
                f"prompt has the lone surrogate {text[place]!r} at character {place}, which is no "
                "text; remove it (it often comes from a file decoded in the wrong way)."
            ) from error

    def decode(self, token_ids: int | Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of some tokens; ids that the tokenizer does not have add nothing.

        Args:
            token_ids: One id or several, as integers of any library.
            skip_special_tokens: Whether special tokens add no text.

        Raises:
            RequestError: They are no integers.
        """
        decoder = self.stream_decoder(skip_special_tokens=skip_special_tokens)
        return decoder.push(_token_ids(token_ids)) + decoder.finish()

    def stream_decoder(
        self,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        continues_text: bool = False,
    ) -> StreamDecoder:
        """Makes a decoder for tokens that arrive a few at a time.

        Args:
            skip_special_tokens: Whether special tokens add no text.
            spaces_between_special_tokens: See `StreamDecoder`.
            continues_text: Whether the tokens carry on an earlier text; a leading space is then
                kept, which `decode` drops for word-mark tokenizers such as Llama 2's.
        """
        return StreamDecoder(
            self._token_bytes,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
            continues_text=continues_text,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds in the middle of a text; empty if it has none."""
        return self._token_bytes.piece(token_id).data

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of a token as the vocabulary spells it; None if it is not there."""
        return self._backend.token_to_id(token)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = ...,
        continue_final_message: bool = ...,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        documents: Sequence[Mapping[str, Any]] | None = ...,
        chat_template: str | None = ...,
        tokenize: Literal[False] = ...,
        **template_kwargs: object,
    ) -> str: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = ...,
        continue_final_message: bool = ...,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        documents: Sequence[Mapping[str, Any]] | None = ...,
        chat_template: str | None = ...,
        tokenize: Literal[True],
        **template_kwargs: object,
    ) -> list[int]: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        tokenize: bool = False,
        **template_kwargs: object,
    ) -> str | list[int]:
        """Renders a conversation to the text, or the tokens, that the model reads.

        Args:
            messages: Dicts with `role` and `content`; left unchanged.
            add_generation_prompt: Whether to open an assistant message at the end. It gives way
                to `continue_final_message`, so that one keyword is enough.
            continue_final_message: Whether the model carries on the last message.
            tools: JSON schemas of the tools that the model may call.
            documents: Texts that the model may quote.
            chat_template: A template's name or source; None takes the model's own.
            tokenize: Whether to return token ids. The template writes BOS itself where the model
                wants one, so none is added.
            **template_kwargs: Further variables of the template, such as `enable_thinking`.

        Raises:
            RequestError: The model has no template, or the template refuses the messages.
            ConfigError: The template is no valid Jinja.
            TypeError: An argument of transformers' method that asks for tensors.
        """
        for name in _TENSOR_ARGUMENTS:
            value = template_kwargs.pop(name, None)
            if value not in (None, False):
                raise TypeError(
                    f"apply_chat_template() returns text, or a list of token ids with "
                    f"tokenize=True, and has no {name}={value!r}; leave it out, and make tensors "
                    "from the list"
                )
        text = self._chat_templates.render(
            messages,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            chat_template=chat_template,
            variables=template_kwargs,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _token_ids(token_ids: int | Iterable[int]) -> list[int]:
    # Arrays with no dimension are integers that look iterable.
    with suppress(TypeError):
        return [index(token_ids)]  # type: ignore[arg-type]
    try:
        return [index(token_id) for token_id in token_ids]  # type: ignore[union-attr]
    except TypeError as error:
        raise RequestError(
            f"token_ids must be a token id or several, all integers, got {token_ids!r}"
        ) from error


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Loads the tokenizer of a checkpoint: from its directory, or from inside its GGUF file.

    Raises:
        ConfigError: The checkpoint has no tokenizer, or one that cannot be used.
    """
    data = checkpoint.tokenizer_data
    if data is None:
        return load_tokenizer_from_directory(checkpoint.path)
    built = build_gguf_tokenizer(data)
    return Tokenizer(
        built.backend,
        special_tokens=built.special_tokens,
        eos_token_ids=built.eos_token_ids,
        chat_templates={} if data.chat_template is None else {"default": data.chat_template},
    )


def load_tokenizer_from_directory(path: str | Path) -> Tokenizer:
    """Loads a Hugging Face tokenizer from its directory.

    Args:
        path: Directory with tokenizer.json, and optionally tokenizer_config.json,
            special_tokens_map.json, added_tokens.json, chat_template.jinja,
            additional_chat_templates/*.jinja and chat_template.json.

    Raises:
        ConfigError: tokenizer.json is missing, or a file cannot be read as what it should be.
    """
    path = Path(path)
    backend = _load_backend(path / "tokenizer.json")
    with _explained(path):
        config = _read_json(path / "tokenizer_config.json")
        if config.get("added_tokens_decoder") is None:
            config = {**config, **_read_json(path / "special_tokens_map.json")}
        declared = _declared_added_tokens(config, path)
        special_tokens = _register_added_tokens(backend, config, declared)
        chat_templates = _load_chat_templates(path, config)
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    eos = special_tokens.get("eos_token")
    eos_id = None if eos is None else backend.token_to_id(eos)
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        eos_token_ids=() if eos_id is None else (eos_id,),
        chat_templates=chat_templates,
    )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns what JSON of another shape raises into an error that says where to look."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            "tokenizer: tokenizer_config.json, special_tokens_map.json, added_tokens.json or "
            f"chat_template.json in {path} holds something of another kind than it should "
            f"({type(error).__name__}: {error}); compare them with the published ones, or download "
            "them again."
        ) from error


def _load_backend(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise ConfigError(
            f"tokenizer: {file.parent} has no tokenizer.json, the only tokenizer format that is "
            "read. transformers writes it: AutoTokenizer.from_pretrained(directory)"
            ".save_pretrained(directory). Or pass skip_tokenizer_init=True and token ids."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        # The library raises plain Exception for whatever it dislikes in the file.
        raise ConfigError(
            f"tokenizer: {file} cannot be read ({error}). Is the download complete? A file made "
            "by a newer release needs a newer `tokenizers` package."
        ) from error
    # Both belong to training; a prompt must never be cut or filled up silently.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"tokenizer: {file} is no valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ConfigError(f"tokenizer: {file} must hold a JSON object.")
    return content


def _declared_added_tokens(config: Mapping[str, Any], path: Path) -> list[tokenizers.AddedToken]:
    """Returns the added tokens that the files beside tokenizer.json declare, in id order."""
    by_id: dict[int, tokenizers.AddedToken] = {}
    declared = config.get("added_tokens_decoder")
    if declared is not None:
        for token_id, token in declared.items():
            by_id[int(token_id)] = _added_token(token)
    else:
        special = {_content(config.get(name)) for name in _SPECIAL_NAMES}
        special.update(_content(token) for token in _extra_special_tokens(config))
        for text, token_id in _read_json(path / "added_tokens.json").items():
            is_special = text in special
            by_id[token_id] = tokenizers.AddedToken(
                text, normalized=not is_special, special=is_special
            )
    return [token for _, token in sorted(by_id.items())]


def _register_added_tokens(
    backend: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    declared: Sequence[tokenizers.AddedToken],
) -> dict[str, str]:
    """Adds to the backend what tokenizer.json itself does not declare as an added token.

    A token that the vocabulary already spells keeps its id; others get the next free ones.

    Returns:
        The text of the named special tokens.
    """
    present = {
        token.content: _flags(token) for token in backend.get_added_tokens_decoder().values()
    }
    missing = [token for token in declared if present.get(token.content) != _flags(token)]
    known = present.keys() | {token.content for token in missing}
    by_content = {token.content: token for token in declared}
    named = {
        name: config[name]
        for name in _SPECIAL_NAMES
        if isinstance(config.get(name), (str, dict)) and _content(config[name])
    }
    for value in (*named.values(), *_extra_special_tokens(config)):
        content = _content(value)
        if content is not None and content not in known:
            token = by_content.get(content) or _added_token(value)
            token.special = True
            missing.append(token)
            known = known | {content}
    if missing:
        backend.add_tokens(missing)
    return {name: str(_content(value)) for name, value in named.items()}


def _extra_special_tokens(config: Mapping[str, Any]) -> list[Any]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    return list(extra.values()) if isinstance(extra, Mapping) else list(extra)


def _content(token: Any) -> str | None:  # noqa: ANN401 - a JSON value
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _added_token(token: str | Mapping[str, Any]) -> tokenizers.AddedToken:
    if isinstance(token, str):
        return tokenizers.AddedToken(token, special=True)
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    flags = {name: bool(token[name]) for name in names if name in token}
    return tokenizers.AddedToken(str(token["content"]), **flags)


def _flags(token: tokenizers.AddedToken) -> tuple[bool, ...]:
    return (token.single_word, token.lstrip, token.rstrip, token.normalized, token.special)


def _load_chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Finds the chat templates: separate files first, then the configs."""
    files = {"default": path / "chat_template.jinja"}
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        files[file.stem] = file
    templates = {name: _read_template(file) for name, file in files.items() if file.is_file()}
    if templates:
        return templates
    entry = config.get("chat_template")
    if entry is None:
        # Written by processors of multimodal models.
        entry = _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, Mapping):
        return {str(name): str(source) for name, source in entry.items()}
    if isinstance(entry, Sequence):
        return {str(item["name"]): str(item["template"]) for item in entry}
    return {}


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"chat_template: {file} is no UTF-8 text ({error}); download it again."
        ) from error
