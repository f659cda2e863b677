"""The code of the README and the examples run, and print what the README says they print."""

import ast
import builtins
import dataclasses
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from nv_core import SamplingParams, Scheduler, SchedulerConfig, StepPlan, WaitReason
from nv_core.policies import SHIPPED_POLICIES
from nv_core.testing import KVOracle, reference_tokens, run_until_idle

ROOT = Path(__file__).parents[2]
README = ROOT / "packages" / "nv-core" / "README.md"
EXAMPLE = ROOT / "examples" / "custom_policy.py"

DOCS = [ROOT / "docs" / "scheduling.md", ROOT / "docs" / "prefix_caching.md"]


def snippets_of(path: Path) -> list[tuple[str, str]]:
    """Blocks of code, each with the output that follows it, if any."""
    pattern = r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?"
    return re.findall(pattern, path.read_text("utf-8"), re.DOTALL)


SNIPPETS = snippets_of(README)


def test_readme_has_its_snippets() -> None:
    assert len(SNIPPETS) == 3
    assert [bool(output) for _, output in SNIPPETS] == [True, False, True]
    assert all(len(code.splitlines()) <= 20 for code, _ in SNIPPETS)


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_readme_snippet_runs(index: int, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = SNIPPETS[index]
    exec(compile(code, f"{README.name} snippet {index}", "exec"), {})
    assert capsys.readouterr().out == output


PAGES = sorted(
    path
    for pattern in ("README.md", "docs/*.md", "packages/*/README.md")
    for path in ROOT.glob(pattern)
    if snippets_of(path)
)


def names_missing_in(codes: Iterable[str]) -> set[str]:
    """Names that pieces of code, run one after the other, use before anything has made them."""
    made = set(dir(builtins))
    missing: set[str] = set()
    for code in codes:
        tree = ast.parse(code)
        compile(tree, "snippet", "exec")
        used: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                made.add(node.name)
            elif isinstance(node, ast.arg):
                made.add(node.arg)
            elif isinstance(node, ast.alias):
                made.add((node.asname or node.name).partition(".")[0])
        missing |= used - made
    return missing


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_on_a_page_needs_nothing_that_is_not_there(path: Path) -> None:
    assert names_missing_in(code for code, _ in snippets_of(path)) == set()


@pytest.mark.parametrize(
    ("code", "missing"),
    [("print(x)", {"x"}), ("import a.b as c; c.d; a", {"a"}), ("x = 1; x", set())],
)
def test_names_that_are_missing_are_found(code: str, missing: set[str]) -> None:
    assert names_missing_in([code]) == missing
    with pytest.raises(SyntaxError):
        names_missing_in([code, "async for x in y: pass"])


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.stem)
def test_worked_examples_print_what_the_page_says(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snippets = snippets_of(path)
    assert len(snippets) == {"scheduling": 2, "prefix_caching": 1}[path.stem]
    for code, output in snippets:
        exec(compile(code, path.name, "exec"), {})
        assert capsys.readouterr().out == output != ""


def test_page_on_scheduling_names_everything_that_there_is() -> None:
    text = DOCS[0].read_text("utf-8")
    for name, policy in SHIPPED_POLICIES.items():
        assert f"| `{name}`" in text
        assert f"| `{policy.__name__}` |" in text
    for reason in WaitReason:
        assert f"`{reason.name}`" in text
    for field in dataclasses.fields(StepPlan):
        assert field.name in ("step_id", "sequences", "sampled_seq_ids", "released") or (
            f"`{field.name}`" in text
        )


def test_readme_names_every_file() -> None:
    package = README.parent / "src" / "nv_core"
    text = README.read_text("utf-8")
    internal = {"__init__.py", "__main__.py", "errors.py", "keywords.py"}
    for path in package.rglob("*.py"):
        indent = "  " * len(path.relative_to(package).parts)
        assert path.name in internal or f"\n{indent}{path.name} " in text


def test_example_prints_two_schedules() -> None:
    result = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=True
    )
    assert result.stderr == ""
    _, mixed, own = result.stdout.split("\n\n")
    assert mixed.splitlines()[0] == "mixed"
    assert own.splitlines()[0] == "ShortestFirst"
    assert "greeting    .   .   .   .   .   .   3   1   1   1" in mixed
    assert "greeting    3   1   1   1" in own


@pytest.mark.parametrize("depth", [1, 2])
def test_policies_of_readme_and_example_hold_up(depth: int) -> None:
    namespace: dict[str, type] = {}
    exec(SNIPPETS[1][0], namespace)
    for policy_class in (namespace["ShortestFirst"], runpy.run_path(str(EXAMPLE))["ShortestFirst"]):
        scheduler = Scheduler(
            SchedulerConfig(8, 4, max_num_batched_tokens=10, policy=policy_class())
        )
        prompts = [[i % 3] * (1 + 5 * i % 17) for i in range(12)]
        sequences = [scheduler.add(prompt, SamplingParams(max_tokens=9)) for prompt in prompts]
        run_until_idle(scheduler, KVOracle(8, 4), depth=depth)
        for prompt, seq in zip(prompts, sequences, strict=True):
            assert seq.output_token_ids == reference_tokens(prompt, 9)


def test_ageing_ends_the_wait_of_the_long_prompt() -> None:
    def num_steps_until_long_prompt_starts(ageing: int) -> int:
        policy = runpy.run_path(str(EXAMPLE))["ShortestFirst"](ageing)
        scheduler = Scheduler(SchedulerConfig(64, 4, max_num_batched_tokens=8, policy=policy))
        long = scheduler.add([1] * 30, SamplingParams(max_tokens=1))
        for step in range(60):
            scheduler.add([2 + step] * 8, SamplingParams(max_tokens=1))
            plan = scheduler.schedule()
            assert plan is not None
            if long.num_computed_tokens:
                return step
            scheduler.commit(plan, {e.seq_id: 7 for e in plan.sequences if e.samples})
        return 60

    assert num_steps_until_long_prompt_starts(0) == 60
    assert num_steps_until_long_prompt_starts(2) < 15
