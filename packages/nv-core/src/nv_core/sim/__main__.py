"""Makes `python -m nv_core.sim` the command `nv-sim`."""

import sys

from nv_core.sim.cli import main

if __name__ == "__main__":
    sys.exit(main())
