"""The command `nv-sim`: simulate, compare, sweep, draw, plan, and play.

Read `entry.py` first; `setting.py` turns the shared options into the objects of a simulation,
`runs.py` holds the commands around logs, `explore.py` the others.
"""

from nv_core.sim.cli.entry import main

__all__ = ["main"]
