"""`python -m nv_runtime` is the `nv` command, for where scripts are not on the path."""

import sys

from nv_runtime.cli import main

if __name__ == "__main__":
    sys.exit(main())
