"""The command `nv-sim`, as far as it works without the extra: it says what to install."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command line; returns the exit status."""
    try:
        from nv_core.sim.cli import main as run
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"nv-sim needs {error.name}; install the extra: pip install 'nv-core[sim]'\n"
        )
        return 1
    return run()
