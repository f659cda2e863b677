"""Reports, pictures, traces and the teaching page: what they hold, and that they run.

The pages' scripts run in node and in headless Chromium where these are found. What they are given
is checked in any case.
"""

from __future__ import annotations

import gzip
import html
import json
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nv_core import ConfigError, SchedulerConfig
from nv_core.sim import (
    SLO,
    ConstantLatency,
    RatePoint,
    StepLog,
    Workload,
    WorkRequest,
    plot_cdfs,
    plot_sweep,
    plot_timeline,
    replay_blocks,
    simulate,
    write_perfetto,
    write_play,
    write_report,
)
from nv_core.sim.perfetto import trace_events
from nv_core.sim.play import default_config, default_workload, play_data
from nv_core.sim.report import CACHED, FREE, SHARED, USED, block_changes, cdf, report_data
from nv_core.sim.timeline import CHUNK, DECODE, PREEMPTED, SLOWER, WAITING, make_lanes

ASSETS = files("nv_core.sim") / "assets"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
NODE = shutil.which("node")


def busy_log(*, policy: str = "mixed", ahead: int = 0) -> StepLog:
    draw = random.Random(0)
    requests = tuple(
        WorkRequest(
            draw.uniform(0, 0.5),
            8 + draw.randint(1, 30),
            draw.randint(2, 20),
            segments=((1, 8),),
            user=f"user {draw.randint(0, 2)} </script>",
            slack_s=0.3,
        )
        for _ in range(25)
    )
    config = SchedulerConfig(30, 4, max_num_batched_tokens=32, policy=policy)
    return simulate(
        Workload("busy", requests),
        config,
        ConstantLatency(0.02),
        num_steps_ahead=ahead,
        record_blocks=True,
    )


def test_lanes_by_hand() -> None:
    """One step a second: A's prompt takes two steps, B waits for the budget."""
    requests = (WorkRequest(0, 12, 3, request_id="A"), WorkRequest(0.5, 6, 2, request_id="B"))
    config = SchedulerConfig(10, 4, max_num_batched_tokens=8)
    log = simulate(Workload("w", requests), config, ConstantLatency(1.0))
    a, b = make_lanes(log)
    assert [(s.start_s, s.end_s, s.kind) for s in a.segments] == [
        (0, 1, CHUNK),
        (1, 2, CHUNK),
        (2, 4, SLOWER),
    ]
    assert a.segments[1].text == "computes tokens 8 to 11"
    assert a.segments[2].text == "decodes 2 tokens"
    assert [(s.start_s, s.end_s, s.kind) for s in b.segments] == [
        (0.5, 1, WAITING),
        (1, 2, CHUNK),
        (2, 3, CHUNK),
        (3, 4, SLOWER),
    ]


@pytest.mark.parametrize("ahead", [0, 1])
def test_lanes_say_why_and_cover_every_life_without_overlap(ahead: int) -> None:
    log = busy_log(ahead=ahead)
    lanes = make_lanes(log)
    assert len(lanes) == 25
    kinds = set()
    for lane in lanes:
        kinds |= {segment.kind for segment in lane.segments}
        end = lane.request.arrival_s
        for segment in lane.segments:
            assert segment.start_s >= end - 1e-9
            assert segment.end_s > segment.start_s
            end = segment.end_s
        assert end == pytest.approx(lane.request.finished_s)
        num_steps = sum(s.num_steps for s in lane.segments if s.kind not in (WAITING, PREEMPTED))
        assert num_steps == sum(lane.request.seq_id in step.seq_ids for step in log.steps)
    assert {WAITING, CHUNK, DECODE, PREEMPTED} <= kinds
    reasons = {s.text for lane in lanes for s in lane.segments if s.kind in (WAITING, PREEMPTED)}
    assert "waits: blocks" in reasons
    assert any(text.startswith("waits behind request") for text in reasons)
    assert any(s.num_cached_tokens for lane in lanes for s in lane.segments)


def test_block_changes_add_up_to_the_pool() -> None:
    log = busy_log()
    changes = block_changes(log)
    assert changes is not None
    states = [FREE] * 30
    for (step, pool), change in zip(replay_blocks(log), changes, strict=True):
        for block, state in change["change"]:
            assert states[block] != state
            states[block] = state
        assert states.count(USED) + states.count(SHARED) == step.num_used_blocks
        assert states.count(SHARED) == sum(count > 1 for count in pool.ref_counts)
        assert states.count(CACHED) == change["cached"] == pool.num_cached_free
    assert any(change["hits"] for change in changes)


def test_a_distribution_function() -> None:
    points = cdf(np.array([3.0, 1.0, np.nan, 2.0]))
    assert points == [(1, 0), (2, 0.5), (3, 1)]
    assert cdf(np.array([np.nan])) == []


def test_a_report_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    path = write_report(busy_log(), tmp_path / "report.html", slo=SLO(ttft_s=0.1))
    text = path.read_text("utf-8")
    assert not re.search(r"https?://|src=|href=|@import|url\(", text)
    assert "default-src 'none'" in text
    # A user's name cannot end the script.
    assert text.count("</script>") == 2
    data = data_of(text)
    assert data["runs"][0]["lanes"][0]["user"].endswith("</script>")
    assert len(data["runs"][0]["lanes"]) == 25


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_a_comparison_holds_every_run(tmp_path: Path) -> None:
    logs = {policy: busy_log(policy=policy) for policy in ("mixed", "fair")}
    data = data_of(write_report(logs, tmp_path / "compare.html").read_text("utf-8"))
    assert data["title"] == "Comparison of mixed, fair"
    assert [run["name"] for run in data["runs"]] == ["mixed", "fair"]
    assert set(data["runs"][0]["cdfs"]) == {"TTFT", "TPOT", "ITL", "E2E", "queue time"}
    with pytest.raises(ConfigError, match="at least one log"):
        write_report({}, tmp_path / "none.html")


def test_a_long_log_is_drawn_with_fewer_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    log = busy_log()
    full = report_data(log, name="full")["steps"]
    monkeypatch.setattr("nv_core.sim.report.MAX_STEPS", 10)
    short = report_data(log, name="short")["steps"]
    assert len(short) <= 10 < len(full)
    assert max(row[5] for row in short) == max(row[5] for row in full)
    assert (short[0][0], short[-1][1]) == (full[0][0], full[-1][1])
    assert sum(row[8] for row in short) == sum(row[8] for row in full)


def test_pictures_through_matplotlib(tmp_path: Path) -> None:
    log = busy_log()
    points = [RatePoint(1.0, (0.9, 1.0), (1.0, 1.0)), RatePoint(2.0, (0.2, 0.4), (0.5, 0.7))]
    timeline = plot_timeline(log, tmp_path / "timeline.png")
    assert timeline.read_bytes().startswith(b"\x89PNG")
    cdfs = plot_cdfs({"one": log, "two": log}, tmp_path / "cdfs.svg")
    assert cdfs.read_text("utf-8").startswith("<?xml")
    sweep = plot_sweep({"mixed": points}, tmp_path / "sweep.svg", target=0.9)
    assert "requests per second" in sweep.read_text("utf-8")
    with pytest.raises(ConfigError, match=r"must end in \.png"):
        plot_timeline(log, tmp_path / "timeline.bmp")


def test_a_trace_for_perfetto(tmp_path: Path) -> None:
    log = busy_log()
    plain = json.loads(write_perfetto(log, tmp_path / "t.json").read_text())
    packed = json.loads(gzip.decompress(write_perfetto(log, tmp_path / "t.json.gz").read_bytes()))
    assert plain == packed
    events = trace_events(log)
    spans = [event for event in events if event["ph"] == "X"]
    assert sum(event["pid"] == 2 for event in spans) == len(log.steps)
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"tokens", "KV blocks used", "waiting", "running"}
    assert sum(event["ph"] == "i" for event in events) == 25


# The teaching page.


def frames() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = play_data()["frames"]
    return made


def test_the_default_scenario_shows_its_five_scenes_in_turn() -> None:
    story = [event["text"] for frame in frames() for event in frame["events"] if event["key"]]
    scenes = [
        "A is admitted; 10 tokens",
        "B is admitted: 2 blocks of its prefix are found",
        "C is admitted; 8 tokens are computed, the rest of it in a later step",
        "C goes on with its prompt",
        "The pool has run dry: C is preempted",
        "C is admitted again: 3 blocks of its prefix are found",
    ]
    places = [next(i for i, text in enumerate(story) if text.startswith(scene)) for scene in scenes]
    assert places == sorted(places)


def test_frames_are_the_plans_of_the_real_scheduler() -> None:
    log = simulate(default_workload(), default_config(), ConstantLatency(1.0), record_blocks=True)
    for frame, (step, pool) in zip(frames(), replay_blocks(log), strict=True):
        assert frame["free"] == step.num_free_blocks
        assert [block["refs"] for block in frame["blocks"]] == pool.ref_counts
        assert {i for i, b in enumerate(frame["blocks"]) if b["cached"]} == pool.cached
        shares = {s["name"]: s["scheduled"] for s in frame["sequences"] if s["scheduled"]}
        names = [log.requests[seq_id].request_id for seq_id in step.seq_ids]
        assert shares == dict(zip(names, step.scheduled, strict=True))
        tables = {s["name"]: s["table"] for s in frame["sequences"] if s["table"]}
        assert tables == {
            log.requests[seq_id].request_id: table for seq_id, table in pool.tables.items() if table
        }


def test_blocks_show_the_tokens_that_they_hold() -> None:
    first = frames()[0]["blocks"]
    assert first[0]["tokens"] == ["A0", "A1", "A2", "A3"]
    assert first[2]["tokens"] == ["A8", "A9", None, None]
    second = frames()[1]["blocks"]
    # B found A's blocks and computes what is behind them.
    assert second[0]["owners"] == ["A", "B"]
    assert second[3]["tokens"] == ["B8", "B9", "B10", "B11"]


def run_node(code: str) -> Any:  # noqa: ANN401 - whatever the script returns
    if NODE is None:
        pytest.skip("node is not installed, so the pages' scripts cannot be run by themselves")
    done = subprocess.run([NODE, "-e", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_report_s_script_computes_what_it_shows() -> None:
    log = busy_log()
    data = report_data(log, name="run")
    lane = next(x for x in data["lanes"] if any(s[2] == 5 for s in x["segments"]))
    preempted = next(s for s in lane["segments"] if s[2] == 5)
    found = run_node(
        f"""
        const r = require({json.dumps(str(ASSETS / "report.js"))});
        const run = {json.dumps(data)};
        const lane = {json.dumps(lane)};
        console.log(JSON.stringify({{
          states: run.blocks.map((_, i) => r.blockStates(run, i)),
          extent: r.extent(run),
          wait: r.describe(lane, {(preempted[0] + preempted[1]) / 2}),
          before: r.describe(lane, -1),
          step: r.describeStep(run, run.steps[3][0]),
          last: [r.lastBefore([[1], [2], [3]], 2.5), r.lastBefore([], 1)],
          times: [0.0123, 0.5, 12, null].map(r.seconds),
        }}));
        """
    )
    for states, (step, pool) in zip(found["states"], replay_blocks(log), strict=True):
        assert states.count(USED) + states.count(SHARED) == step.num_used_blocks
        assert states.count(CACHED) == pool.num_cached_free
    assert found["extent"] == [0, pytest.approx(log.end_s)]
    assert found["wait"].splitlines()[1].startswith("preempted, ")
    assert found["before"] is None
    assert found["step"].splitlines()[0].startswith("step 3, 20.00 ms")
    assert found["last"] == [1, -1]
    assert found["times"] == ["12.30 ms", "500 ms", "12.0 s", "-"]


def test_the_teaching_page_s_script_computes_what_it_shows() -> None:
    found = run_node(
        f"""
        const p = require({json.dumps(str(ASSETS / "play.js"))});
        const frames = {json.dumps(frames())};
        const jumps = [];
        for (let i = 0; i < frames.length - 1; i = p.nextKey(i, frames)) jumps.push(i);
        console.log(JSON.stringify({{
          jumps,
          classes: frames[1].blocks.map(p.blockClass),
          texts: frames[1].blocks.map(p.blockText),
          clamp: [p.clamp(-1, frames), p.clamp(99, frames)],
        }}));
        """
    )
    assert found["jumps"][:4] == [0, 1, 3, 4]
    assert found["classes"][0] == "block shared hit"
    assert found["classes"][3] == "block used new"
    assert found["classes"][9] == "block"
    assert found["texts"][0] == "A + B · refs 2"
    assert found["clamp"] == [0, len(frames()) - 1]


@pytest.fixture
def chromium_dom(tmp_path: Path) -> Callable[[Path, str], Any]:
    """Opens a page in headless Chromium, runs a script on it and returns what that returned."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (chromium, chromium-browser or google-chrome)")
    chromium: str = CHROMIUM

    def run(page: Path, script: str) -> Any:  # noqa: ANN401 - whatever the script returns
        text = page.read_text("utf-8")
        code = f"""<script>
        window.onerror = message => document.body.dataset.error = message;
        const result = (() => {{ {script} }})();
        const out = document.createElement("pre");
        out.id = "result";
        out.textContent = JSON.stringify(result);
        document.body.appendChild(out);
        </script></body>"""
        driven = tmp_path / f"driven-{page.name}"
        driven.write_text(text.replace("</body>", code), encoding="utf-8")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            done = subprocess.run(
                [
                    chromium,
                    "--headless",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--window-size=1280,1000",
                    f"--user-data-dir={profile}",
                    "--dump-dom",
                    driven.as_uri(),
                ],
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
            )
        assert done.returncode == 0, done.stderr
        assert "data-error" not in done.stdout
        assert 'data-ready="yes"' in done.stdout
        found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
        assert found is not None, done.stdout[-2000:]
        return json.loads(html.unescape(found[1]))

    return run


def test_the_teaching_page_in_chromium(tmp_path: Path, chromium_dom: Any) -> None:  # noqa: ANN401
    page = write_play(tmp_path / "play.html")
    shown = chromium_dom(
        page,
        """
        const button = text => [...document.querySelectorAll("button")]
          .find(node => node.textContent.includes(text));
        const look = () => ({
          index: Number(document.body.dataset.index),
          label: document.getElementById("label").textContent,
          refs: [...document.querySelectorAll(".block")].map(b => Number(b.dataset.refs)),
          cached: document.querySelectorAll(".block.cached").length,
          hits: document.querySelectorAll(".block.hit").length,
          key: [...document.querySelectorAll(".events .key")].map(e => e.textContent),
          tables: Object.fromEntries([...document.querySelectorAll(".seq")].map(s =>
            [s.dataset.name, s.querySelector("code").textContent])),
        });
        const frames = [look()];
        while (!button("step ▶").disabled) { button("step ▶").click(); frames.push(look()); }
        button("first").click();
        button("next event").click();
        const jumped = look();
        document.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
        return { frames, jumped, back: look().index, atEnd: frames.length };
        """,
    )
    expected = frames()
    assert shown["atEnd"] == len(expected)
    for index, (frame, seen) in enumerate(zip(expected, shown["frames"], strict=True)):
        assert seen["index"] == index
        assert seen["refs"] == [block["refs"] for block in frame["blocks"]]
        assert seen["hits"] == sum(block["hit"] for block in frame["blocks"])
        free_but_cached = [b for b in frame["blocks"] if b["cached"] and not b["refs"]]
        assert seen["cached"] == len(free_but_cached)
        assert seen["key"] == [event["text"] for event in frame["events"] if event["key"]]
        assert seen["tables"] == {
            s["name"]: f"block table [{', '.join(map(str, s['table']))}]"
            for s in frame["sequences"]
        }
        assert f"step {frame['step']} " in seen["label"]
    assert shown["jumped"]["index"] == 1
    assert shown["back"] == 0


def test_the_report_in_chromium(tmp_path: Path, chromium_dom: Any) -> None:  # noqa: ANN401
    logs = {policy: busy_log(policy=policy) for policy in ("mixed", "fair")}
    page = write_report(logs, tmp_path / "report.html")
    shown = chromium_dom(
        page,
        """
        const canvas = document.querySelector(".timeline canvas");
        const move = (node, x, y) => {
          const box = node.getBoundingClientRect();
          node.dispatchEvent(new MouseEvent("mousemove",
            { clientX: box.left + x, clientY: box.top + y, bubbles: true }));
          return document.getElementById("tip").textContent;
        };
        const tips = new Set();
        for (let row = 0; row < 25; row++) for (let x = 75; x < 1100; x += 5) {
          tips.add(move(canvas, x, 14 * row + 7));
        }
        const strip = move(canvas, 400, 14 * 25 + 40);
        for (const button of document.querySelectorAll(".timeline button")) button.click();
        const slider = document.querySelector(".blockmap input");
        slider.value = slider.max;
        slider.oninput();
        return {
          canvases: document.querySelectorAll("canvas").length,
          sections: [...document.querySelectorAll("h2")].map(h => h.textContent),
          tips: [...tips], strip,
          blocks: document.querySelector(".blockmap input + span").textContent,
        };
        """,
    )
    assert shown["canvases"] == 5 + 2 * 2
    assert "Timeline of fair" in shown["sections"]
    assert any("waits: blocks" in tip for tip in shown["tips"])
    assert any("waits behind request" in tip for tip in shown["tips"])
    assert any("found in the prefix cache" in tip for tip in shown["tips"])
    assert "tokens of 32" in shown["strip"]
    last = logs["mixed"].steps[-1]
    assert f"step {last.step_id}: {last.num_used_blocks} used" in shown["blocks"]
