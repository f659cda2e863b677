"""Finds a model: on this machine, or on the Hugging Face Hub.

A name that looks like a path is only ever a path, so that a mistyped one is reported as such and
never sent to the Hub.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nv_core.errors import ConfigError, NvError

__all__ = ["ModelNotFoundError", "resolve_model"]

logger = logging.getLogger(__name__)

# What a checkpoint consists of here. Repositories also carry pickled weights, other frameworks'
# weights and pictures, often as large again.
_DESCRIPTION_FILES = ("*.json", "*.jinja")
_WEIGHT_FILES = ("*.safetensors",)
_UNWANTED_FILES = (
    # Copies of the same weights in the layout of the authors' own code.
    "original/*",
    "consolidated*",
    "onnx/*",
    "openvino/*",
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class ModelNotFoundError(NvError, ValueError):
    """A model is neither on this machine nor to be had from the Hub."""


def resolve_model(
    model: str | Path,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    with_weights: bool = True,
) -> Path:
    """Returns where a model's files are, after downloading them if need be.

    Args:
        model: A local directory, a local `.gguf` file, or a Hub id such as `Qwen/Qwen3-0.6B`. What
            exists here wins over the Hub.
        revision: Branch, tag or commit on the Hub; None for the default branch. Local models have
            none; a warning says that it is not used.
        cache_dir: Where downloads are kept; None for the Hub library's usual place.
        with_weights: Whether weights are downloaded too, or only what describes the model.

    Returns:
        A directory or a `.gguf` file. Files that were downloaded before are not downloaded again;
        new ones show the Hub library's progress bar.

    Raises:
        ModelNotFoundError: No such model; the message says what was looked for and what to do.
        ConfigError: A local file of another kind.
    """
    name = str(model)
    if not name:
        raise ModelNotFoundError("model is empty; give a directory, a .gguf file or a Hub id.")
    # Not by methods of `Path`: those raise for names that no file can have.
    path = Path(os.path.expanduser(name))
    if os.path.exists(path):
        if revision is not None:
            logger.warning("revision %r is not used: %s is on this machine", revision, path)
        return _check_local(path)
    if isinstance(model, Path) or _looks_like_path(name):
        raise ModelNotFoundError(_missing_path_message(path))
    if not _HUB_ID.fullmatch(name):
        raise ModelNotFoundError(
            f"model: {name!r} is neither an existing path nor a Hub id; give a directory, a .gguf "
            "file or an id such as Qwen/Qwen3-0.6B."
        )
    files = _DESCRIPTION_FILES + (_WEIGHT_FILES if with_weights else ())
    return _download(name, files, revision=revision, cache_dir=cache_dir)


def _check_local(path: Path) -> Path:
    if path.is_dir() or path.suffix.lower() == ".gguf":
        return path
    raise ConfigError(
        f"model: {path} is a file, but no .gguf file; give the directory that holds the model's "
        "config.json and weights."
    )


def _looks_like_path(name: str) -> bool:
    """Whether a name can be meant as a path only, or begins with a directory that is here."""
    if name.startswith(("/", "./", "../", "~")) or name in (".", ".."):
        return True
    if "\\" in name or name.endswith("/") or name.count("/") > 1:
        return True
    if name.lower().endswith((".gguf", ".safetensors", ".bin", ".json")):
        return True
    return "/" in name and os.path.isdir(Path(name).parent)


def _missing_path_message(path: Path) -> str:
    parent = path.parent
    if not os.path.isdir(parent):
        return f"model: there is no {path}: the directory {parent} does not exist."
    others = sorted(
        entry.name for entry in parent.iterdir() if entry.is_dir() or entry.suffix == ".gguf"
    )
    shown = ", ".join(others[:8]) + (", ..." if len(others) > 8 else "")
    hint = f" In {parent} there are: {shown}." if others else ""
    return f"model: there is no {path}.{hint}"


def _download(
    repo_id: str, files: tuple[str, ...], *, revision: str | None, cache_dir: str | Path | None
) -> Path:
    # Imported here: it brings an HTTP client, which local models do without.
    import huggingface_hub
    from huggingface_hub import errors

    def fetch(*, local_files_only: bool) -> Path:
        directory = huggingface_hub.snapshot_download(
            repo_id,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=list(files),
            ignore_patterns=list(_UNWANTED_FILES),
            local_files_only=local_files_only,
        )
        return Path(directory)

    with _explained(repo_id, revision):
        try:
            directory = fetch(local_files_only=False)
        except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
            # Some releases of the library ask the Hub about a pinned commit that is here already.
            try:
                directory = fetch(local_files_only=True)
            except errors.LocalEntryNotFoundError:
                raise error from error.__cause__
    if not (directory / "config.json").exists():
        raise ModelNotFoundError(
            f"model: {repo_id} on the Hub has no config.json, so it is no Hugging Face checkpoint. "
            "If it offers GGUF files, download one of them and give its path."
        )
    return directory


@contextmanager
def _explained(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turns the Hub library's errors into ones that say what to do."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"model: {repo_id} asks for a licence to be accepted first. Accept it on its page of "
            "the Hub, then log in here with `hf auth login`."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"revision: {repo_id} has no revision {revision!r}.") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"model: {repo_id} is no path on this machine, and the Hub has no such public model. "
            "Check the spelling; for a private model log in with `hf auth login`."
        ) from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"model: {repo_id!r} is no valid Hub id ({error}).") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        reason = f" ({error.__cause__})" if error.__cause__ is not None else ""
        raise ModelNotFoundError(
            f"model: {repo_id} is no path on this machine and was not downloaded before, and the "
            f"Hub cannot be reached{reason}. Check the network (and HF_HUB_OFFLINE, if you set "
            "it), or give the path of a local copy."
        ) from error
    except errors.HfHubHTTPError as error:
        raise ModelNotFoundError(
            f"model: the Hub did not hand out {repo_id} ({error}). Try again later, or give the "
            "path of a local copy."
        ) from error
