"""What importing a package does, seen from a new interpreter outside the checkout."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files

import pytest

IMPORT_ALL = """
import importlib, pkgutil
package = importlib.import_module({module!r})
for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
        print(found.name)
"""

LOADED = """
import json, sys
import {module}
print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""

LOADED_FULL = """
import json, sys
import nv_core
print(json.dumps(sorted(sys.modules)))
"""

BLOCKED = """
import sys
blocked = dict.fromkeys({blocked!r})
sys.modules.update(blocked)  # None: the import fails, and find_spec finds nothing
import {module}
assert blocked.items() <= sys.modules.items()
"""

TIMED = """
import time
started = time.process_time()
import nv_core
print(time.process_time() - started)
"""


def _module(package: str) -> str:
    return package.replace("-", "_")


def test_every_module_imports(package: str, run_python: Callable[[str], str]) -> None:
    imported = run_python(IMPORT_ALL.format(module=_module(package)))
    on_disk = {path.name for path in files(_module(package)).iterdir() if path.name.endswith(".py")}
    names = {line.rpartition(".")[2] + ".py" for line in imported.splitlines()}
    assert on_disk - names <= {"__init__.py", "__main__.py"}


def test_the_package_says_that_it_is_typed(package: str) -> None:
    assert files(_module(package)).joinpath("py.typed").is_file()


def test_a_package_imports_only_its_closure(
    package: str, first_party: dict[str, frozenset[str]], run_python: Callable[[str], str]
) -> None:
    loaded = set(json.loads(run_python(LOADED.format(module=_module(package)))))
    ours = {name for name in first_party if _module(name) in loaded}
    assert ours <= first_party[package] | {package}


@pytest.mark.parametrize(
    "heavy", ["torch", "numpy", "triton", "transformers", "flash_attn", "flash_attn_interface"]
)
def test_nv_core_imports_nothing_heavy(
    heavy: str, expected_packages: frozenset[str], run_python: Callable[[str], str]
) -> None:
    if "nv-core" in expected_packages:
        assert heavy not in json.loads(run_python(LOADED.format(module="nv_core")))


def test_nv_core_needs_no_extra(
    expected_packages: frozenset[str], run_python: Callable[[str], str]
) -> None:
    if "nv-core" in expected_packages:
        blocked = {"numpy", "matplotlib", "click", "tqdm", "torch"}
        run_python(BLOCKED.format(module="nv_core", blocked=blocked))
        run_python(BLOCKED.format(module="nv_core.step_log", blocked=blocked))
        loaded = json.loads(run_python(LOADED_FULL))
        assert not [name for name in loaded if name.startswith("nv_core.sim")]


def test_nv_core_imports_in_milliseconds(
    expected_packages: frozenset[str], run_python: Callable[[str], str]
) -> None:
    if "nv-core" in expected_packages:
        # Far above the usual 50 ms of processor time, and far below an import of torch.
        assert min(float(run_python(TIMED)) for _ in range(3)) < 0.3


def test_transformers_is_never_imported(package: str, run_python: Callable[[str], str]) -> None:
    assert "transformers" not in json.loads(run_python(LOADED.format(module=_module(package))))


def test_imports_without_optional_packages(package: str, run_python: Callable[[str], str]) -> None:
    blocked = {"triton", "flash_attn", "flash_attn_interface", "transformers"}
    run_python(BLOCKED.format(module=_module(package), blocked=blocked))
