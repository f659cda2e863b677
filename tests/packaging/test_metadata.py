"""What installers see: one version, exact pins of our own, nothing heavy behind nv-core."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, distribution, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name


def _requirements(name: str) -> list[Requirement]:
    """What `pip install NAME` asks for on this machine, extras left out."""
    parsed = [Requirement(line) for line in requires(name) or ()]
    return [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]


def _everything_required(name: str) -> set[str]:
    """The names that `pip install NAME` brings in, followed through what is installed here."""
    found: set[str] = set()
    pending = [name]
    while pending:
        for requirement in _requirements(pending.pop()):
            required = canonicalize_name(requirement.name)
            if required not in found:
                found.add(required)
                pending.append(required)
    return found


def test_the_environment_holds_exactly_the_expected_packages(
    first_party: dict[str, frozenset[str]], expected_packages: frozenset[str]
) -> None:
    installed = set()
    for name in first_party:
        try:
            version(name)
        except PackageNotFoundError:
            continue
        installed.add(name)
    assert installed == expected_packages


def test_all_versions_are_in_lock_step(expected_packages: frozenset[str]) -> None:
    assert len({version(name) for name in expected_packages}) == 1


def test_the_module_knows_its_version(package: str) -> None:
    module = importlib.import_module(package.replace("-", "_"))
    assert module.__version__ == version(package)


def test_first_party_requirements_are_exact(
    package: str, first_party: dict[str, frozenset[str]]
) -> None:
    ours = {r.name: r for r in _requirements(package) if canonicalize_name(r.name) in first_party}
    assert set(ours) == first_party[package]
    for requirement in ours.values():
        assert requirement.specifier == SpecifierSet(f"=={version(package)}")


def test_third_party_requirements_have_a_floor_and_no_pin(
    package: str, first_party: dict[str, frozenset[str]]
) -> None:
    theirs = [r for r in _requirements(package) if canonicalize_name(r.name) not in first_party]
    assert theirs
    for requirement in theirs:
        operators = {specifier.operator for specifier in requirement.specifier}
        assert ">=" in operators, f"{package}: {requirement} has no floor"
        assert "==" not in operators, f"{package}: {requirement} is pinned"


def test_every_requirement_is_met_here(package: str) -> None:
    for requirement in _requirements(package):
        assert requirement.specifier.contains(version(requirement.name), prereleases=True)


def test_nv_core_needs_nothing_but_a_hash(expected_packages: frozenset[str]) -> None:
    if "nv-core" in expected_packages:
        assert _everything_required("nv-core") == {"xxhash"}


def test_the_laboratory_is_an_extra(expected_packages: frozenset[str]) -> None:
    if "nv-core" in expected_packages:
        parsed = [Requirement(line) for line in requires("nv-core") or ()]
        extra = {r.name for r in parsed if r.marker and r.marker.evaluate({"extra": "sim"})}
        assert extra == {"numpy", "matplotlib", "click", "tqdm"}


def test_nv_kernels_needs_no_package_of_ours(
    first_party: dict[str, frozenset[str]], expected_packages: frozenset[str]
) -> None:
    if "nv-kernels" in expected_packages:
        assert _everything_required("nv-kernels").isdisjoint(first_party)


def test_the_metadata_is_complete(package: str) -> None:
    metadata = distribution(package).metadata
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Summary"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
