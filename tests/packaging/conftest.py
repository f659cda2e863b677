"""What the packages of this workspace may depend on, and which of them this environment holds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

FIRST_PARTY: dict[str, frozenset[str]] = {
    "nv-core": frozenset(),
    "nv-kernels": frozenset(),
    "nv-models": frozenset({"nv-core", "nv-kernels"}),
    "nv-runtime": frozenset({"nv-core", "nv-kernels", "nv-models"}),
}
"""Every package with the packages of ours that it may import; closed under dependency."""


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test that takes `package` once for each package of ours that is installed here."""
    if "package" in metafunc.fixturenames:
        metafunc.parametrize("package", [name for name in FIRST_PARTY if _is_installed(name)])


@pytest.fixture(scope="session")
def first_party() -> dict[str, frozenset[str]]:
    """Every package with the packages of ours that it may import."""
    return FIRST_PARTY


@pytest.fixture(scope="session")
def expected_packages() -> frozenset[str]:
    """The packages of ours that must be installed here, and no others.

    `NV_WHEEL_UNDER_TEST` is set by the environments that hold one package's wheels (hatch.toml);
    everywhere else these tests run with the whole workspace.
    """
    under_test = os.environ.get("NV_WHEEL_UNDER_TEST")
    if under_test is None:
        return frozenset(FIRST_PARTY)
    return FIRST_PARTY[under_test] | {under_test}


@pytest.fixture(scope="session")
def run_python(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Runs code in a new interpreter, away from the checkout, and returns what it printed."""
    away = tmp_path_factory.mktemp("away")

    def run(code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=away, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the git checkout that holds these tests; skips where there is none."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        pytest.skip("the tests do not lie in a git checkout")
    return root
