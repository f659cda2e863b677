"""The command group `nv-sim`, and what becomes of errors.

An error that a user can do something about is one line on standard error and exit status 1; a wrong
command line is exit status 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from nv_core.errors import NvError
from nv_core.sim.cli.explore import plan, play, sweep
from nv_core.sim.cli.runs import compare, report, run

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="nv-core", prog_name="nv-sim")
def nv_sim() -> None:
    """See what a scheduling policy does, without a GPU.

    The scheduler is the real one; only the time of each step is predicted.
    """


for _command in (run, compare, sweep, report, plan, play):
    nv_sim.add_command(_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments; None takes those of the process.

    Returns:
        The exit status: 0, 1 for an error, 2 for a wrong command line, 130 after Ctrl-C.
    """
    args = None if argv is None else list(argv)
    try:
        nv_sim.main(args=args, prog_name="nv-sim", standalone_mode=False)
    except click.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (NvError, OSError) as error:
        click.echo(f"nv-sim: {error}", err=True)
        return 1
    return 0
