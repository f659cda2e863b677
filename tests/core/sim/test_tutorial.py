"""The pages on the laboratory: their code runs, and prints what they say it prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from nv_core.sim import HARDWARE, LOOK_ALIKES, READERS
from nv_core.sim.cli import main

DOCS = Path(__file__).parents[3] / "docs"
TUTORIAL = (DOCS / "write_a_policy.md").read_text("utf-8")
README = (DOCS.parent / "README.md").read_text("utf-8")
REFERENCE = (DOCS / "simulator.md").read_text("utf-8")

SNIPPETS: list[tuple[str, str]] = re.findall(
    r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", TUTORIAL, re.DOTALL
)


def test_the_tutorial_s_code_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    assert len(SNIPPETS) == 5
    for code, output in SNIPPETS:
        exec(compile(code, "write_a_policy.md", "exec"), namespace)
        assert capsys.readouterr().out == output != ""
    assert (tmp_path / "policies.html").stat().st_size > 10_000


def test_the_policy_of_the_tutorial_has_ten_lines() -> None:
    code = SNIPPETS[1][0]
    body = code[code.index("class ShortFirst") : code.index("\n\n\nshort = ")]
    assert len(body.splitlines()) == 10


@pytest.mark.parametrize("page", [TUTORIAL, REFERENCE], ids=["tutorial", "reference"])
def test_the_commands_of_the_pages_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    commands = [
        line for block in blocks for line in block.splitlines() if line.startswith("nv-sim ")
    ]
    assert commands
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, command


def test_the_example_of_the_readme_shows_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"```bash\nnv-sim (.*)\n```", README)
    assert main(shlex.split(command)) == 0
    (row,) = re.findall("TTFT.*", capsys.readouterr().out)
    p90s = [cell.split(" / ")[2] for cell in re.split(r"  +", row)[1:]]
    mixed, fair = (float(p90.removesuffix(" ms")) / 1000 for p90 in p90s)
    assert f"within {fair:.2f} s under `fair` and within {mixed:.1f} s under `mixed`" in (
        README.replace("\n", " ")
    )
    assert (tmp_path / "policies.html").exists()


def test_the_reference_names_everything_that_there_is() -> None:
    for name in (*LOOK_ALIKES, *READERS, *HARDWARE):
        assert name.lower() in REFERENCE.lower(), name
