"""Says what to install where something of the extra `nv-core[sim]` is missing.

numpy is needed by everything here, so importing this module asks for it; matplotlib by pictures
(`nv_core.sim.plots`), click and tqdm by the command line.
"""

from __future__ import annotations

from importlib.util import find_spec


def require(name: str) -> None:
    """Checks that a package is installed.

    Raises:
        ModuleNotFoundError: It is not; the message says what to do.
    """
    if find_spec(name) is None:
        raise ModuleNotFoundError(
            f"nv_core.sim needs {name}; install the extra: pip install 'nv-core[sim]'", name=name
        )


require("numpy")
