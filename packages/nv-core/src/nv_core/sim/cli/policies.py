"""Policies as a command line names them, and what a user is told when one of them fails."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from nv_core.errors import ConfigError, NvError, SchedulingError
from nv_core.policies import SHIPPED_POLICIES, Policy

policy_option = click.option(
    *("--policy", "-p", "policies"),
    multiple=True,
    help="See nv-sim compare.  [default: mixed, or the log's]",
)
"""Policies for a command that has one if none is given: the log's or "mixed"."""


def distinct(names: Iterable[str]) -> tuple[str, ...]:
    """Returns every policy once, in order, and says which were given again."""
    kept: dict[str, None] = {}
    for name in names:
        if name in kept:
            click.echo(f"policy {name} was given more than once; it is simulated once", err=True)
        kept[name] = None
    return tuple(kept)


def load_policy(text: str) -> str | Policy:
    """Returns a policy by its name, or makes one: `module:Class` or `file.py:Class`.

    Raises:
        ConfigError: There is no such policy, or its code fails; the message names the line.
    """
    if text in SHIPPED_POLICIES:
        return text
    source, colon, name = text.rpartition(":")
    if not colon:
        raise ConfigError(
            f"policy must be one of {', '.join(SHIPPED_POLICIES)}, or module:Class, or "
            f"file.py:Class, got {text!r}"
        )
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
        policy = getattr(module, name)()
    # Somebody else's code, which may raise whatever it likes.
    except Exception as error:
        raise ConfigError(f"policy {text!r} cannot be made: {_describe(error, source)}") from error
    if not callable(getattr(policy, "schedule", None)):
        raise ConfigError(f"policy {text!r} has no method schedule(step)")
    made: Policy = policy
    return made


@contextmanager
def failures_of(name: str, policy: str | Policy) -> Iterator[None]:
    """Turns what a user's policy raises into an error that shows the policy's own frames.

    Args:
        name: What the user called the policy.
        policy: The policy; what a shipped one raises is our own error and goes on as it is.

    Raises:
        SchedulingError: The policy raised.
    """
    try:
        yield
    except NvError:
        raise
    except Exception as error:
        frames = None if isinstance(policy, str) else _frames_of(policy, error)
        if frames is None:
            raise
        raise SchedulingError(f"policy {name!r} raised:\n{frames}") from error


def _frames_of(policy: Policy, error: Exception) -> str | None:
    """The traceback from the first line of the policy's own file on; None if it is not in it."""
    module = sys.modules.get(type(policy).__module__)
    mark = f'  File "{getattr(module, "__file__", None)}", line '
    here = "".join(traceback.format_exception(type(error), error, error.__traceback__, chain=False))
    # What a process of a sweep raised comes with the text of that process's traceback.
    there = str(error.__cause__).rstrip().removesuffix('"""')
    for text in (here, there):
        if mark in text:
            return text[text.index(mark) :].rstrip()
    return None


def _describe(error: Exception, source: str) -> str:
    """The error on one line, with the line of the user's file that raised it."""
    message = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).name == Path(source).name]
    return f"{message} ({source}, line {own[-1].lineno})" if own else message


def _load_module(name: str) -> ModuleType:
    return importlib.import_module(name)


def _load_file(path: Path) -> Any:  # noqa: ANN401 - whatever the module holds
    name = f"nv_sim_policy_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ImportError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    # Processes of a sweep look the class up by the name of its module.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
