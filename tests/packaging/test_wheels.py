"""Only where built wheels are installed: nothing comes from the checkout, nothing else is there."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sysconfig
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import pytest

pytestmark = pytest.mark.skipif(
    "NV_WHEEL_UNDER_TEST" not in os.environ,
    reason="needs an environment of built wheels (`hatch run wheel:test`)",
)


def test_the_module_comes_from_site_packages(package: str) -> None:
    module = importlib.import_module(package.replace("-", "_"))
    assert module.__file__ is not None
    site_packages = Path(sysconfig.get_path("purelib")).resolve()
    assert site_packages in Path(module.__file__).resolve().parents


def test_the_wheel_was_installed_by_path(package: str) -> None:
    direct_url = json.loads(distribution(package).read_text("direct_url.json") or "{}")
    assert direct_url["url"].startswith("file:")
    assert direct_url["url"].endswith(".whl")
    assert "dir_info" not in direct_url


def test_the_wheel_ships_its_marker_and_licence(package: str) -> None:
    shipped = {str(path) for path in distribution(package).files or ()}
    assert f"{package.replace('-', '_')}/py.typed" in shipped
    assert any(path.endswith(".dist-info/licenses/LICENSE") for path in shipped)


def test_packages_outside_the_closure_are_absent(
    first_party: dict[str, frozenset[str]], expected_packages: frozenset[str]
) -> None:
    for name in set(first_party) - expected_packages:
        assert importlib.util.find_spec(name.replace("-", "_")) is None


def test_nv_core_alone_has_no_torch() -> None:
    if os.environ["NV_WHEEL_UNDER_TEST"] == "nv-core":
        assert importlib.util.find_spec("torch") is None


def test_the_wheel_of_nv_core_is_small(expected_packages: frozenset[str]) -> None:
    """Pages, scripts and quantile tables of the laboratory included."""
    if "nv-core" in expected_packages:
        direct_url = json.loads(distribution("nv-core").read_text("direct_url.json") or "{}")
        wheel = Path(url2pathname(urlparse(direct_url["url"]).path))
        assert wheel.stat().st_size < 200_000


def test_the_wheel_of_nv_core_ships_its_pages_and_its_command(
    expected_packages: frozenset[str],
) -> None:
    if "nv-core" in expected_packages:
        found = distribution("nv-core")
        shipped = {str(path) for path in found.files or ()}
        for name in ("page.html", "page.css", "report.js", "play.js"):
            assert f"nv_core/sim/assets/{name}" in shipped
        assert "nv-sim" in {entry.name for entry in found.entry_points}
