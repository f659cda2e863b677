"""The command group `nv`, and what becomes of errors.

An error that a user can do something about is one line on standard error and exit status 1; a wrong
command line is exit status 2, with a hint at the usage. `--debug` shows the traceback instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from nv_core.errors import NvError
from nv_runtime.cli.bench import bench
from nv_runtime.cli.chat import chat
from nv_runtime.cli.generate import generate
from nv_runtime.cli.info import info
from nv_runtime.cli.session import ChatModel, CliSession, load_llm

__all__ = ["main"]

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended, as shells have it."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="nv-runtime", prog_name="nv")
def nv() -> None:
    """Run language models with the nv inference engine.

    MODEL is a directory, a .gguf file, or a Hub id such as Qwen/Qwen3-0.6B.
    """


nv.add_command(generate)
nv.add_command(chat)
nv.add_command(info)
nv.add_command(bench)


def main(
    argv: Sequence[str] | None = None,
    *,
    load: Callable[[str, Mapping[str, Any]], ChatModel] = load_llm,
) -> int:
    """Runs the command line.

    Args:
        argv: The arguments; None takes those of the process.
        load: Loads a model; tests pass their own.

    Returns:
        The exit status: 0, 1 for an error, 2 for a wrong command line, 130 after Ctrl-C.
    """
    session = CliSession(load=load)
    args = None if argv is None else list(argv)
    try:
        status = nv.main(args=args, prog_name="nv", standalone_mode=False, obj=session)
    except click.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (NvError, OSError, ValueError, RuntimeError, ImportError) as error:
        if session.debug:
            raise
        click.echo(f"nv: {error or type(error).__name__}", err=True)
        return 1
    return status if isinstance(status, int) else 0
