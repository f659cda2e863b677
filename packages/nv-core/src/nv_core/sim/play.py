"""The teaching page: a small scenario, stepped through on the plans of the real scheduler.

The default scenario shows in turn an admission, a prefix hit of two blocks, a prompt that is cut
over two steps, a preemption when the pool runs dry, and a re-admission that finds cached blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from nv_core.config import SchedulerConfig
from nv_core.sim.block_map import Pool, replay_blocks
from nv_core.sim.latency import ConstantLatency
from nv_core.sim.report import make_page
from nv_core.sim.simulator import simulate
from nv_core.sim.workload import Workload, WorkRequest
from nv_core.step_log import StepLog, StepRecord

MAX_FRAMES = 500

INTRO = (
    "Every frame is one plan of the real scheduler: which request computes how many tokens, in "
    "which blocks, and why others wait. Step with the buttons or the arrow keys; 'next event' "
    "jumps to the next frame in which something new happens."
)


def default_config() -> SchedulerConfig:
    """Limits of the default scenario: eleven blocks of four tokens, ten tokens a step."""
    return SchedulerConfig(num_blocks=11, block_size=4, max_num_seqs=4, max_num_batched_tokens=10)


def default_workload() -> Workload:
    """The default scenario: B has A's first two blocks, C is long."""
    system = ((1, 8),)
    return Workload(
        "play",
        (
            WorkRequest(0, 10, 9, segments=(*system, (2, 2)), request_id="A", output_segment=3),
            WorkRequest(1, 12, 9, segments=(*system, (4, 4)), request_id="B", output_segment=5),
            WorkRequest(3, 14, 8, segments=((6, 14),), request_id="C", output_segment=7),
        ),
    )


def write_play(
    path: str | PathLike[str],
    *,
    workload: Workload | None = None,
    config: SchedulerConfig | None = None,
) -> Path:
    """Writes the page.

    Args:
        path: The file to write.
        workload: The scenario; arrivals are step numbers. None for the default one.
        config: Limits and policy; None for the default ones.

    Returns:
        The path.
    """
    path = Path(path)
    path.write_text(make_page("play", play_data(workload, config)), encoding="utf-8")
    return path


def play_data(
    workload: Workload | None = None, config: SchedulerConfig | None = None
) -> dict[str, Any]:
    """What the page shows, ready for JSON: a frame for each step."""
    workload = default_workload() if workload is None else workload
    config = default_config() if config is None else config
    log = simulate(workload, config, ConstantLatency(1.0), record_blocks=True)
    narrator = _Narrator(log)
    frames = [
        narrator.frame(step, pool)
        for (step, pool), _ in zip(replay_blocks(log), range(MAX_FRAMES), strict=False)
    ]
    return {
        "title": "How the scheduler works, step by step",
        "intro": INTRO,
        "blockSize": config.block_size,
        "budget": config.max_num_batched_tokens,
        "frames": frames,
    }


@dataclass
class _Story:
    """What the narrator knows of one request."""

    name: str
    num_prompt: int
    num_tokens: int = 0
    computed: int = 0
    scheduled: int = 0
    is_running: bool = False
    is_cut: bool = False
    was_preempted: bool = False
    reason: str | None = None


@dataclass
class _Narrator:
    """Turns steps into frames and words."""

    log: StepLog
    stories: dict[int, _Story] = field(default_factory=dict)
    contents: dict[int, list[str | None]] = field(default_factory=dict)

    def frame(self, step: StepRecord, pool: Pool) -> dict[str, Any]:
        """Describes one step."""
        events = self._arrivals_and_ends(step)
        events += self._losses(step)
        events += self._shares(step, pool)
        events += self._refusals(step)
        now = self._fill(step, pool)
        blocks = self._blocks(step, pool, now)
        frame = {
            "step": step.step_id,
            "used": step.num_scheduled_tokens,
            "free": step.num_free_blocks,
            "events": [{"text": text, "key": key} for text, key in events],
            "blocks": blocks,
            "sequences": self._sequences(step, pool),
        }
        for seq_id in step.sampled:
            self.stories[seq_id].num_tokens += 1
        return frame

    def _arrivals_and_ends(self, step: StepRecord) -> list[tuple[str, bool]]:
        events = []
        for seq_id, request in self.log.requests.items():
            if seq_id not in self.stories and request.arrival_s <= step.planned_s:
                prompt = request.num_prompt_tokens
                self.stories[seq_id] = _Story(request.request_id, prompt, prompt)
                events.append((f"{request.request_id} arrives with {prompt} prompt tokens.", False))
            elif (
                seq_id in step.released
                and request.finished_s is not None
                and (request.finished_s <= step.planned_s)
            ):
                self.stories[seq_id].is_running = False
                events.append(
                    (
                        f"{request.request_id} has ended ({request.finish_reason}); its blocks are "
                        "free, and keep their content.",
                        True,
                    )
                )
        return events

    def _losses(self, step: StepRecord) -> list[tuple[str, bool]]:
        events = []
        for seq_id in step.preempted:
            story = self.stories[seq_id]
            story.is_running, story.was_preempted = False, True
            events.append(
                (
                    f"The pool has run dry: {story.name} is preempted. Its {story.num_tokens} "
                    "tokens stay, its blocks go back to the pool with their content.",
                    True,
                )
            )
        return events

    def _shares(self, step: StepRecord, pool: Pool) -> list[tuple[str, bool]]:
        events = []
        for story in self.stories.values():
            story.scheduled = 0
        for seq_id, computed, scheduled in zip(
            step.seq_ids, step.computed, step.scheduled, strict=True
        ):
            story = self.stories[seq_id]
            story.computed, story.scheduled, story.reason = computed, scheduled, None
            hits = len(pool.hits.get(seq_id, ()))
            is_new = not story.is_running
            story.is_running = True
            is_cut = seq_id not in step.sampled
            if is_new:
                again = " again" if story.was_preempted else ""
                text = f"{story.name} is admitted{again}"
                if hits:
                    blocks = "block" if hits == 1 else "blocks"
                    text += f": {hits} {blocks} of its prefix are found in the cache"
                text += f"; {scheduled} tokens are computed"
                if is_cut:
                    text += ", the rest of it in a later step: the budget is used up"
                events.append((text + ".", True))
            elif is_cut or story.is_cut:
                events.append((f"{story.name} goes on with its prompt: {scheduled} tokens.", True))
            else:
                events.append((f"{story.name} decodes one token.", False))
            story.is_cut = is_cut
        return events

    def _refusals(self, step: StepRecord) -> list[tuple[str, bool]]:
        events = []
        refused = dict(step.refused)
        for seq_id, story in self.stories.items():
            ended = self.log.requests[seq_id].finished_s
            if story.is_running or (ended is not None and ended <= step.planned_s):
                continue
            story.reason = refused.get(seq_id, "not considered")
            if seq_id not in step.preempted:
                events.append((f"{story.name} waits: {story.reason}.", False))
        return events

    def _fill(self, step: StepRecord, pool: Pool) -> dict[int, set[int]]:
        """Notes which slots the step writes; returns them by block."""
        size = self.log.header.block_size
        now: dict[int, set[int]] = {}
        hits = {b for ids in pool.hits.values() for b in ids}
        for block_ids in step.new_blocks.values():
            for block_id in block_ids:
                if block_id not in hits:
                    self.contents[block_id] = [None] * size
        for seq_id, computed, scheduled in zip(
            step.seq_ids, step.computed, step.scheduled, strict=True
        ):
            story = self.stories[seq_id]
            for position in range(computed, computed + scheduled):
                block_id = pool.tables[seq_id][position // size]
                mark = f"{story.name}{position}"
                self.contents[block_id][position % size] = mark
                now.setdefault(block_id, set()).add(position % size)
        return now

    def _blocks(
        self, step: StepRecord, pool: Pool, now: dict[int, set[int]]
    ) -> list[dict[str, Any]]:
        hits = {b for ids in pool.hits.values() for b in ids}
        fresh = {b for ids in step.new_blocks.values() for b in ids} - hits
        owners: dict[int, list[str]] = {}
        for seq_id, table in pool.tables.items():
            for block_id in table:
                owners.setdefault(block_id, []).append(self.stories[seq_id].name)
        size = self.log.header.block_size
        return [
            {
                "refs": refs,
                "owners": owners.get(block_id, []),
                "cached": block_id in pool.cached,
                "hit": block_id in hits,
                "fresh": block_id in fresh,
                "tokens": list(self.contents.get(block_id, [None] * size))
                if refs or block_id in pool.cached
                else [None] * size,
                "now": sorted(now.get(block_id, ())),
            }
            for block_id, refs in enumerate(pool.ref_counts)
        ]

    def _sequences(self, step: StepRecord, pool: Pool) -> list[dict[str, Any]]:
        rows = []
        for seq_id, story in self.stories.items():
            ended = self.log.requests[seq_id].finished_s
            is_over = ended is not None and ended <= step.planned_s
            status = "finished" if is_over else ("running" if story.is_running else "waiting")
            rows.append(
                {
                    "name": story.name,
                    "status": status,
                    "tokens": story.num_tokens,
                    "computed": story.computed if status == "running" else 0,
                    "scheduled": story.scheduled,
                    "table": list(pool.tables.get(seq_id, ())),
                    "reason": story.reason if status == "waiting" else None,
                }
            )
        return rows
