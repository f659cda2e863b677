"""The checkout itself: its layout, and that it names no registry and no one's machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

TOP_LEVEL = {
    ".ci",
    ".gitignore",
    "benchmarks",
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "docs",
    "examples",
    "hatch.toml",
    "packages",
    "pyproject.toml",
    "tests",
}

PRIVATE = re.compile(
    r"\bpypi\.org|\bpythonhosted\.org|\bdownload\.pytorch\.org|\banaconda\.org|\bnpmjs\.(?:org|com)"
    r"|(?<![\w./:~])/(?:root|home|Users|work|opt|mnt|tmp)/"
)
"""A package registry's host, or an absolute path of one machine."""


def _committed(checkout: Path) -> list[str]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=checkout, capture_output=True, text=True, check=True
    )
    return [name for name in listing.stdout.split("\0") if name]


def test_the_top_level_holds_what_it_should_and_nothing_else(checkout: Path) -> None:
    top_level = {name.partition("/")[0] for name in _committed(checkout)}
    assert top_level == TOP_LEVEL


def test_every_package_has_the_same_layout(
    checkout: Path, first_party: dict[str, frozenset[str]]
) -> None:
    packages = checkout / "packages"
    assert {path.name for path in packages.iterdir() if path.is_dir()} == set(first_party)
    for name in first_party:
        module = packages / name / "src" / name.replace("-", "_")
        for path in (
            packages / name / "README.md",
            packages / name / "pyproject.toml",
            module / "__init__.py",
            module / "py.typed",
        ):
            assert path.is_file(), f"{path} is missing"
        assert [path.name for path in (packages / name / "src").iterdir()] == [module.name]


def test_every_package_carries_the_licence(
    checkout: Path, first_party: dict[str, frozenset[str]]
) -> None:
    licence = (checkout / "LICENSE").read_text(encoding="utf-8")
    for name in first_party:
        assert (checkout / "packages" / name / "LICENSE").read_text(encoding="utf-8") == licence


def test_committed_files_name_no_registry_and_no_machine(checkout: Path) -> None:
    offences = [
        f"{name}:{number}: {line.strip()[:120]}"
        for name in _committed(checkout)
        if (checkout / name).is_file()
        for number, line in enumerate(
            (checkout / name).read_text(encoding="utf-8", errors="replace").splitlines(), start=1
        )
        if PRIVATE.search(line)
    ]
    assert not offences, "\n".join(offences)


def test_the_pattern_for_private_names_finds_them() -> None:
    home = "/" + "home"
    assert PRIVATE.search(f"reads {home}/someone/model.gguf")
    assert PRIVATE.search("https://files.pythonhosted" + ".org/packages")
    assert not PRIVATE.search("https://example.com/home/page and ~/.cache/x")
