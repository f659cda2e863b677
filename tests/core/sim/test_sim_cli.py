"""The command `nv-sim`, as a shell would run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import nv_core
from nv_core import ConfigError, SchedulerConfig
from nv_core.sim import (
    LOOK_ALIKES,
    SLO,
    ConstantLatency,
    RatePoint,
    Workload,
    WorkRequest,
    find_highest_rate,
    find_model,
    simulate,
)
from nv_core.sim.cli import main
from nv_core.sim.cli.setting import Setting
from nv_core.step_log import read_step_log

Run = Callable[..., tuple[int, str, str]]

SMALL = ("-n", "20", "--num-blocks", "600", "--model", "qwen3-0.6b", "-q")


@pytest.fixture
def nv_sim(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_run_writes_everything_that_it_can(nv_sim: Run, tmp_path: Path) -> None:
    names = {"--out": "r.html", "--log": "l.jsonl.gz", "--perfetto": "p.json", "--plot": "t.svg"}
    options = [part for flag, name in names.items() for part in (flag, tmp_path / name)]
    status, out, err = nv_sim("run", *SMALL, "--ttft-ms", 200, *options)
    assert status == 0
    assert "goodput (TTFT <= 200 ms)" in out
    assert err.count("wrote ") == 3
    for name in names.values():
        assert (tmp_path / name).stat().st_size > 500
    log = read_step_log(tmp_path / "l.jsonl.gz")
    assert len(log.requests) == 20
    assert log.header.model == find_model("qwen3-0.6b").as_dict()


def test_compare_shows_policies_side_by_side(nv_sim: Run, tmp_path: Path) -> None:
    policy = tmp_path / "mine.py"
    policy.write_text(
        "from nv_core import Mixed\n\n\nclass Mine(Mixed):\n    pass\n", encoding="utf-8"
    )
    status, out, _ = nv_sim(
        "compare",
        *SMALL,
        *("-p", "fair", "-p", f"{policy}:Mine", "-p", "nv_core.policies:SkipAhead"),
        *("--out", tmp_path / "c.html", "--plot", tmp_path / "c.png"),
    )
    assert status == 0
    head = out.splitlines()[0]
    assert head.split() == ["fair", f"{policy}:Mine", "nv_core.policies:SkipAhead"]
    assert (tmp_path / "c.html").exists()
    assert (tmp_path / "c.png").exists()


def test_report_reads_what_run_wrote(nv_sim: Run, tmp_path: Path) -> None:
    log = tmp_path / "l.jsonl"
    assert nv_sim("run", *SMALL, "--log", log)[0] == 0
    status, out, err = nv_sim("report", log, "--out", tmp_path / "r.html")
    assert status == 0
    assert "output tokens per second" in out
    assert "wrote" in err
    text = log.read_text("utf-8")
    log.write_text(text[: len(text) // 2], encoding="utf-8")
    status, out, err = nv_sim("report", log, log)
    assert status == 0
    assert "ends within a line" in err


def test_the_log_holds_the_events_as_they_happened(nv_sim: Run, tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    assert nv_sim("run", *SMALL, "--rate", 2, "--log", path)[0] == 0
    _, *lines = path.read_text("utf-8").splitlines(keepends=True)
    events = [json.loads(line) for line in lines]
    now = 0.0
    open_ids: set[int] = set()
    for event in events:
        if event["event"] == "add":
            assert event["arrival_s"] <= now or not open_ids
            now = max(now, event["arrival_s"])
            open_ids.add(event["seq_id"])
        elif event["event"] == "step":
            assert set(event["seq_ids"]) <= open_ids
            now = event["done_s"]
        else:
            assert event["finished_s"] == now
            open_ids.remove(event["seq_id"])
    kinds = [event["event"] for event in events]
    assert kinds.index("finish") < len(kinds) - 1 - kinds[::-1].index("add")

    num_finished = kinds[: len(kinds) // 2].count("finish")
    assert num_finished > 0
    text = path.read_text("utf-8")
    cut = sum(len(line) for line in text.splitlines(keepends=True)[: 1 + len(kinds) // 2])
    path.write_text(text[: cut + 5], encoding="utf-8")
    log = read_step_log(path)
    assert log.is_truncated
    assert sum(r.finish_reason is not None for r in log.all_requests) == num_finished


@pytest.mark.parametrize("option", ["--out", "--log", "--perfetto", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_first(
    nv_sim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(Setting, "simulate", lambda *_, **__: pytest.fail("it was simulated"))
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.svg").mkdir()
    for name in ("nowhere/x.svg", "file/x.svg", "folder.svg"):
        status, out, err = nv_sim("run", *SMALL, option, tmp_path / name)
        assert (status, out) == (2, "")
        assert f"'{option}'" in err
        assert name.split("/")[0] in err
    status, _, err = nv_sim("compare", *SMALL, "-p", "fair", "--plot", tmp_path / "x.doc")
    assert status == 2
    assert ".png, .svg, .pdf" in err


@pytest.fixture
def fitted(nv_sim: Run, tmp_path: Path) -> Path:
    """A log of limits of which none is the default."""
    log = tmp_path / "l.jsonl"
    limits = ("--block-size", 32, "--max-num-seqs", 7, "--max-num-batched-tokens", 500)
    more = ("--max-model-len", 9000, "--no-prefix-caching", "--steps-ahead", 0, "-p", "fair")
    assert nv_sim("run", *SMALL, *limits, *more, "--log", log)[0] == 0
    return log


def test_what_is_not_given_is_taken_from_the_fitted_log(
    nv_sim: Run, tmp_path: Path, fitted: Path
) -> None:
    again = tmp_path / "again.jsonl"
    status, out, err = nv_sim("run", "-n", 20, "-q", "--fit-log", fitted, "--log", again)
    assert status == 0
    assert "TTFT" in out
    assert "error on steps held out" in err
    assert (
        "taken from the log: block_size 32, max_model_len 9000, max_num_batched_tokens 500" in err
    )
    assert "model qwen3-0.6b, num_blocks 600, policy fair, prefix_caching False" in err
    before, after = read_step_log(fitted).header, read_step_log(again).header
    assert replace(after, device=None) == replace(before, device=None)
    assert str(before.device) in str(after.device)


def test_what_is_given_goes_before_the_fitted_log(
    nv_sim: Run, tmp_path: Path, fitted: Path
) -> None:
    again = tmp_path / "again.jsonl"
    command = ("run", "-n", 20, "-q", "--fit-log", fitted, "--log", again)
    given = ("--block-size", 16, "--max-num-seqs", 256, "--prefix-caching", "-p", "mixed")
    assert nv_sim(*command, *given)[0] == 0
    header = read_step_log(again).header
    assert (header.block_size, header.max_num_seqs) == (16, 256)
    assert (header.policy, header.enable_prefix_caching) == ("mixed", True)
    # The same memory, in blocks of another size.
    assert header.num_blocks == 1200
    assert header.max_num_batched_tokens == 500

    status, _, err = nv_sim(*command, "-m", "qwen3-8b", "--gpu", "h100")
    assert status == 0
    assert "the times are the log's all the same, whatever model, gpu was given" in err
    header = read_step_log(again).header
    assert header.model == find_model("qwen3-8b").as_dict()
    assert header.num_blocks > 1200


def test_the_cache_is_the_log_s_unless_another_is_asked_for(nv_sim: Run, tmp_path: Path) -> None:
    log, again = tmp_path / "fp8.jsonl", tmp_path / "again.jsonl"
    assert nv_sim("run", *SMALL, "--kv-cache-dtype", "fp8_e4m3", "--log", log)[0] == 0
    command = ("run", "-n", 20, "-q", "--fit-log", log, "--log", again)
    for given, kv_dtype_bytes in ((None, 1), ("fp8", 1), ("fp8_e4m3", 1), ("auto", None)):
        more = () if given is None else ("--kv-cache-dtype", given)
        assert nv_sim(*command, *more)[0] == 0
        model = read_step_log(again).header.model
        assert model is not None
        assert model["kv_dtype_bytes"] == kv_dtype_bytes
    # A model of one's own has the cache that its dtype asks for.
    assert nv_sim(*command, "-m", "qwen3-8b")[0] == 0
    assert read_step_log(again).header.model == find_model("qwen3-8b").as_dict()


def test_a_gpu_without_fp8_is_remarked_on(nv_sim: Run) -> None:
    command = ("plan", "llama-3-8b", "-n", 20)
    for dtype in ("fp8", "fp8_e4m3"):
        status, out, err = nv_sim(*command, "--gpu", "a100", "--kv-cache-dtype", dtype)
        assert status == 0
        assert "64.00 KiB" in out
        assert err.startswith("a100 has no fp8 conversion: ")
        assert not nv_sim(*command, "--gpu", "h100", "--kv-cache-dtype", dtype)[2]
    assert not nv_sim(*command, "--gpu", "a100")[2]
    assert not nv_sim(*command, "--gpu", "a100", "--kv-cache-dtype", "auto")[2]


def test_a_log_that_names_no_model_or_policy_says_so(
    nv_sim: Run, tmp_path: Path, fitted: Path
) -> None:
    head, *lines = fitted.read_text("utf-8").splitlines(keepends=True)
    header = {**json.loads(head), "model": None, "policy": "PatientShortFirst"}
    fitted.write_text(json.dumps(header) + "\n" + "".join(lines), encoding="utf-8")
    status, _, err = nv_sim("run", "-n", 20, "-q", "--fit-log", fitted)
    assert status == 0
    assert "the log does not say its model; qwen3-8b is assumed" in err
    assert "PatientShortFirst, cannot be made from its name; mixed is simulated" in err


@pytest.mark.parametrize("command", ["compare", "sweep", "plan"])
def test_every_command_takes_the_log_s_limits(nv_sim: Run, fitted: Path, command: str) -> None:
    more = {
        "compare": ("-p", "mixed", "-p", "priority", "-q"),
        "sweep": ("--ttft-ms", 60, "--seeds", 1, "--jobs", 1, "--tolerance", 9),
        "plan": ("qwen3-0.6b",),
    }[command]
    status, _, err = nv_sim(command, *more, "-n", 20, "--fit-log", fitted)
    assert status == 0
    assert err.count("taken from the log: block_size 32") == 1
    assert ("policy fair" in err) == (command != "compare")


def test_sweep_finds_a_rate_and_draws_it(nv_sim: Run, tmp_path: Path) -> None:
    status, out, err = nv_sim(
        "sweep",
        *SMALL[:-1],
        *("--ttft-ms", 60, "--seeds", 2, "--jobs", 2, "--tolerance", 1.0, "--low", 1),
        *("--plot", tmp_path / "s.svg"),
    )
    assert status == 0
    rate = float(out.split(": ")[1].split()[0])
    assert 1 <= rate <= 200
    assert err.count("/s  ") >= 3
    assert (tmp_path / "s.svg").exists()


def test_plan_says_what_fits(nv_sim: Run) -> None:
    status, out, _ = nv_sim("plan", "llama-3-8b", "--gpu", "h100", "-n", 20)
    assert status == 0
    assert "14.96 GiB" in out
    assert "128.00 KiB" in out
    assert "20 requests of azure-conversation" in out
    assert "ITL mean / p50 / p99" in out
    status, out, _ = nv_sim("plan", "llama-3-8b", "--gpu", "h100", "-n", 20, "--kv-cache-dtype=fp8")
    assert "14.96 GiB" in out
    assert "64.00 KiB" in out
    status, out, _ = nv_sim("plan", "llama-3-70b", "--gpu", "h100")
    assert status == 0
    assert "It does not fit." in out
    status, out, _ = nv_sim("plan", "llama-3-70b", "--gpu", "h100", "--tp", 4, "-n", 20)
    assert "memory of 4 x h100" in out
    assert "busy" in out


def test_plan_reads_a_config(nv_sim: Run, tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "vocab_size": 131,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert nv_sim("plan", tmp_path, "-n", 20)[0] == 0
    (tmp_path / "config.json").write_text("hello")
    status, _, err = nv_sim("plan", tmp_path)
    assert status == 1
    assert "is no config of a model" in err


def test_play_writes_the_teaching_page(nv_sim: Run, tmp_path: Path) -> None:
    status, _, err = nv_sim("play", "--out", tmp_path / "play.html")
    assert status == 0
    assert "wrote" in err
    assert "step by step" in (tmp_path / "play.html").read_text("utf-8")


def test_lines_that_were_left_out_are_said(nv_sim: Run, tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("arrival_s,num_prompt_tokens,num_output_tokens\n0,9,9\nx,y,z\n1,9,9\n")
    status, out, err = nv_sim("run", *SMALL, "--workload", table)
    assert status == 0
    assert "1 lines were left out" in err
    assert "line 3" in err
    assert out.split()[1] == "2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "-w", "nowhere.csv"), "workload must be a file or one of azure-conversation"),
        (("run", "-p", "best"), "policy must be one of mixed"),
        (("run", "-p", "no.such:Thing"), "cannot be made"),
        (("run", "-p", "nv_core:SchedulerConfig"), "cannot be made"),
        (("run", "-p", "nv_core:FinishReason"), "cannot be made"),
        (("run", "-p", "collections:OrderedDict"), "has no method schedule"),
        (("run", "-m", "eliza"), "model must be one of"),
        (("run", "-m", "llama-3-70b", "--gpu", "h100"), "does not fit 1 x h100"),
        (("report", "nowhere.jsonl"), "nowhere.jsonl"),
        (("run", "--rate", "-1"), "rate_per_s must be positive"),
        (("run", "--rate", "1e-320"), "rate_per_s"),
        (("run", "--tp", "3"), "num_heads = 32 is not a multiple of it"),
        (("plan", "qwen3-8b", "--tp", "5"), "tensor_parallel_size = 5 cannot share qwen3-8b"),
        (("run", "-w", "."), "directory"),
        (("run", "-m", "."), "config.json"),
        (("run", "--fit-log", "."), "directory"),
    ],
)
def test_errors_are_one_line(nv_sim: Run, arguments: tuple[str, ...], message: str) -> None:
    status, out, err = nv_sim(*arguments)
    assert status == 1
    assert out == ""
    assert err.startswith("nv-sim: ")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("option", ["--workload", "--model", "--fit-log", "report"])
@pytest.mark.parametrize("content", [bytes(range(256)), b"[1]", b'{"hidden_size": "x"}', b""])
def test_a_file_of_another_kind_is_refused_in_a_line(
    nv_sim: Run, tmp_path: Path, option: str, content: bytes
) -> None:
    path = tmp_path / "thing"
    path.write_bytes(content)
    command = ("report", path) if option == "report" else ("run", "-q", option, path)
    status, out, err = nv_sim(*command)
    assert (status, out) == (1, "")
    assert err.startswith("nv-sim: ")
    assert "thing" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--num-requests", -1),
        ("--num-requests", 0),
        ("--block-size", 0),
        ("--num-blocks", 0),
        ("--max-num-seqs", 0),
        ("--max-num-batched-tokens", -3),
        ("--max-model-len", 1),
        ("--tensor-parallel-size", 0),
    ],
)
def test_a_number_out_of_range_names_its_option(nv_sim: Run, option: str, value: int) -> None:
    status, out, err = nv_sim("run", option, value)
    assert (status, out) == (2, "")
    assert f"Invalid value for '{option}'" in err
    assert str(value) in err


POLICIES = """
from nv_core import Mixed


class Bad(Mixed):
    def schedule(self, step):
        self.divide()

    def divide(self):
        return 1 // 0


class Unmade(Mixed):
    def __init__(self):
        raise KeyError("what")
"""


@pytest.mark.parametrize(
    "command",
    [("run", *SMALL), ("sweep", *SMALL[:-1], "--ttft-ms", 9, "--seeds", 2, "--jobs", 2)],
    ids=["run", "sweep"],
)
def test_a_policy_that_raises_is_shown_where(
    nv_sim: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(POLICIES, encoding="utf-8")
    status, _, err = nv_sim(*command, "-p", f"{path}:Bad")
    assert status == 1
    lines = err[err.index("nv-sim: ") :].splitlines()
    assert lines[0] == f"nv-sim: policy '{path}:Bad' raised:"
    assert lines[1] == f'  File "{path}", line 7, in schedule'
    assert lines[-1] == "ZeroDivisionError: integer division or modulo by zero"
    assert [line for line in lines if "File" in line and str(path) not in line] == []


@pytest.mark.parametrize(
    ("source", "message"),
    [(POLICIES, "KeyError: 'what' ("), ("\n1 / 0\n", "ZeroDivision"), ("def f(:", "SyntaxError")],
)
def test_a_policy_that_cannot_be_made_says_why(
    nv_sim: Run, tmp_path: Path, source: str, message: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source, encoding="utf-8")
    status, _, err = nv_sim("run", *SMALL, "-p", f"{path}:Unmade")
    assert status == 1
    assert len(err.splitlines()) == 1
    assert message in err
    assert "mine.py, line" in err


def test_one_policy_is_simulated_once(nv_sim: Run) -> None:
    status, _, err = nv_sim("run", *SMALL, "-p", "mixed", "-p", "fair")
    assert status == 2
    assert "run simulates one policy, got mixed, fair; nv-sim compare takes several" in err
    status, out, err = nv_sim("compare", *SMALL, "-p", "fair", "-p", "mixed", "-p", "fair")
    assert status == 0
    assert out.splitlines()[0].split() == ["fair", "mixed"]
    assert "policy fair was given more than once" in err


def test_logs_of_one_name_are_two(nv_sim: Run, tmp_path: Path) -> None:
    paths = [tmp_path / name / "l.jsonl" for name in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        assert nv_sim("run", *SMALL, "--log", path)[0] == 0
    status, out, _ = nv_sim("report", *paths)
    assert status == 0
    assert out.splitlines()[0].split() == [str(path) for path in paths]


@pytest.mark.parametrize("command", [("run",), ("compare", "-p", "fair")])
def test_why_nothing_was_served_is_said(nv_sim: Run, command: tuple[str, ...]) -> None:
    status, _, err = nv_sim(*command, *SMALL, "--max-model-len", 2)
    assert status == 0
    assert "none of the 20 requests was served; the first because: a prompt of" in err
    assert "max_model_len = 2" in err


def test_a_sweep_that_finds_no_rate_says_why(nv_sim: Run) -> None:
    limits = ("--max-model-len", 2, "--ttft-ms", 60, "--seeds", 1, "--jobs", 1)
    status, out, err = nv_sim("sweep", *SMALL[:-1], *limits)
    assert status == 0
    assert out == "mixed: 0.000 requests/s\n"
    assert "mixed: too few meet the objectives even at --low, 0.1/s" in err
    assert "mixed: none of the 20 requests was served; the first because: a prompt of" in err


@pytest.mark.parametrize(
    "arguments", [("sweep",), ("compare",), ("dance",), ("run", "--gpu", "abacus")]
)
def test_wrong_command_lines_are_status_2(nv_sim: Run, arguments: tuple[str, ...]) -> None:
    assert nv_sim(*arguments)[0] == 2


def test_help_names_the_commands(nv_sim: Run) -> None:
    status, out, _ = nv_sim("--help")
    assert status == 0
    for command in ("run", "compare", "sweep", "report", "plan", "play"):
        assert f"\n  {command} " in out


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))
import nv_core, nv_core.step_log
{code}
"""
COMMAND = "from nv_core.sim_command import main; sys.exit(main())"
PICTURE = "from nv_core.sim import plot_cdfs; plot_cdfs({}, 'x.png')"


@pytest.mark.parametrize(
    ("missing", "code", "message"),
    [
        (["numpy"], COMMAND, "nv-sim needs numpy; install the extra: pip install 'nv-core[sim]'"),
        (["click"], COMMAND, "nv-sim needs click; install the extra: pip install 'nv-core[sim]'"),
        (["numpy"], "import nv_core.sim", "nv_core.sim needs numpy; install the extra"),
        (["matplotlib"], PICTURE, "nv_core.sim needs matplotlib; install the extra"),
    ],
)
def test_without_the_extra_it_is_said_what_to_install(
    missing: list[str], code: str, message: str
) -> None:
    source = str(Path(nv_core.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing=missing, code=code)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]


# The search behind `sweep`, on a server that takes one request a second.


def one_slot(seed: int) -> Workload:
    return Workload("slot", tuple(WorkRequest(i + 0.01 * seed, 4, 10) for i in range(40)))


def search(
    *, low_per_s: float, high_per_s: float, tolerance: float = 0.05
) -> tuple[float, list[RatePoint]]:
    config = SchedulerConfig(10, 4, max_num_seqs=1, policy="mixed")
    tried: list[RatePoint] = []
    found = find_highest_rate(
        [one_slot(0), one_slot(1)],
        config,
        ConstantLatency(0.1),
        slo=SLO(ttft_s=0.5),
        target=1.0,
        on_point=tried.append,
        low_per_s=low_per_s,
        high_per_s=high_per_s,
        tolerance=tolerance,
    )
    assert [point.rate_per_s for point in found.points] == sorted(p.rate_per_s for p in tried)
    return found.rate_per_s, tried


def test_the_highest_rate_is_what_the_server_takes() -> None:
    # Ten steps of 0.1 s a request; the last may wait 0.4 s at most, 39 requests after the first.
    rate, tried = search(low_per_s=0.1, high_per_s=50.0, tolerance=0.01)
    assert rate == pytest.approx(1.0, rel=0.03)
    for point in tried:
        assert (point.attainment == 1.0) == (point.rate_per_s <= rate)


def test_a_search_can_end_at_either_end() -> None:
    assert search(low_per_s=5.0, high_per_s=50.0)[0] == 0.0
    assert search(low_per_s=0.1, high_per_s=0.5)[0] == 0.5


def test_a_search_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match="0 < low_per_s < high_per_s"):
        search(low_per_s=5.0, high_per_s=1.0)


def test_processes_change_nothing() -> None:
    config = SchedulerConfig(200, 16, policy="fair")
    workloads = [LOOK_ALIKES["sessions"](20, seed=seed) for seed in range(2)]
    results = [
        find_highest_rate(
            workloads,
            config,
            ConstantLatency(0.02),
            slo=SLO(ttft_s=1.0),
            tolerance=2.0,
            num_processes=num_processes,
        )
        for num_processes in (1, 2)
    ]
    assert results[0] == results[1]
    assert simulate(workloads[0], config, ConstantLatency(0.02)).steps
