"""RankWatch: a thread of rank 0 that notices when a rank is gone.

A rank that dies breaks its line; one that fails reports before it ends; one that falls silent lets
a deadline pass. Whatever it is, the watch keeps the reason, kills the other ranks, and aborts the
collectives in which rank 0 may be waiting for them. So nothing of rank 0 waits for ever, and
whoever gets an error out of an aborted collective finds the true reason here.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from nv_runtime.ranks.channel import Message, readable
from nv_runtime.ranks.errors import RankError
from nv_runtime.ranks.processes import RankProcess

_GATHERING_S = 0.3
"""When one rank is gone, others fail of that: so long for the first cause to arrive as well."""
_EXIT_S = 2.0
"""How long a rank whose line is broken may take to end."""
_LOOK_S = 0.1
"""How often deadlines are looked at."""


class RankWatch:
    """Watches the started ranks until it is stopped or one fails."""

    def __init__(
        self,
        processes: Sequence[RankProcess],
        *,
        describe_late: Callable[[], str],
        abort: Callable[[], None],
    ) -> None:
        """Starts watching.

        Args:
            processes: The started ranks.
            describe_late: Says which ranks a step waits for, when its deadline has passed.
            abort: Ends the collectives in which this process may be waiting.
        """
        self._processes = list(processes)
        self._describe_late = describe_late
        self._abort = abort
        self._changed = threading.Condition()
        self._num_ready = 0
        self._failure: str | None = None
        self._deadline: float | None = None
        self._deadline_s = 0.0
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="rank watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises the failure, if there is one.

        Raises:
            RankError: A rank is gone; the message says which, and why.
        """
        if self._failure is not None:
            raise RankError(self._failure)

    def wait_for_failure(self, timeout_s: float) -> bool:
        """Waits until a failure is known; returns whether one is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._failure is not None, timeout_s)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Waits until every rank has reported that it is ready.

        Raises:
            RankError: A rank failed, or took too long.
        """
        everyone = len(self._processes)
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or self._num_ready == everyone, timeout_s
            )
        self.check()
        if self._num_ready < everyone:
            self.fail(f"{everyone - self._num_ready} of {everyone} ranks did not start in time")
            self.check()

    def set_deadline(self, seconds: float | None) -> None:
        """Gives the ranks so long from now on; None for as long as they like."""
        self._deadline_s = seconds or 0.0
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def fail(self, reason: str) -> None:
        """Takes the group down for a reason of the caller's; only the first reason counts."""
        with self._changed:
            if self._failure is not None:
                return
            self._failure = reason
            self._changed.notify_all()
        for process in self._processes:
            process.kill()
        self._abort()

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller runs in the thread that watches, which cannot wait for its own end."""
        return self._thread is threading.current_thread()

    def stop(self) -> None:
        """Ends the watch; what happens to the ranks after that is nobody's failure."""
        if self._thread.is_alive():
            os.write(self._wake_write, b"!")
            self._thread.join()
        if self._wake_read >= 0:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_read = -1

    def _run(self) -> None:
        try:
            self._watch()
        except Exception:  # noqa: BLE001 - unwatched, a rank could keep rank 0 waiting for ever
            self.fail(f"the watch over the ranks failed:\n{traceback.format_exc()}")

    def _watch(self) -> None:
        lines = [process.channel.fileno() for process in self._processes]
        while self._failure is None:
            heard = readable([self._wake_read, *lines], _LOOK_S)
            if self._wake_read in heard:
                return
            if heard:
                self._hear()
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                self.fail(
                    f"no answer within {self._deadline_s:g} s from {self._describe_late()}; raise "
                    "rank_timeout_s if a step may take so long"
                )

    def _hear(self) -> None:
        """Reads all lines; when one rank is gone, gathers the reasons and fails."""
        reports, gone = self._read_lines()
        if reports or gone:
            stop = time.monotonic() + _GATHERING_S
            while len(gone) < len(self._processes) and time.monotonic() < stop:
                time.sleep(0.01)
                more_reports, more_gone = self._read_lines()
                reports.update(more_reports)
                gone |= more_gone
            self.fail(self._first_cause(reports, gone))

    def _read_lines(self) -> tuple[dict[int, Message], set[int]]:
        """Reads every line.

        Returns:
            Reports of failures by rank, and the ranks that are gone.
        """
        reports: dict[int, Message] = {}
        gone: set[int] = set()
        for process in self._processes:
            messages, is_open = process.channel.receive_available()
            for message in messages:
                if message["kind"] == "failed":
                    reports[process.rank] = message
                else:
                    with self._changed:
                        self._num_ready += 1
                        self._changed.notify_all()
            if not is_open:
                gone.add(process.rank)
        return reports, gone

    def _first_cause(self, reports: dict[int, Message], gone: set[int]) -> str:
        """Names the rank that failed first: one that died without a word made others fail."""
        for process in self._processes:
            if process.rank in gone and process.rank not in reports:
                ending = process.exit_text(_EXIT_S) or "closed its line"
                return (
                    f"rank {process.rank} (process {process.pid}) {ending} without a report; "
                    "look at its standard error, and at the system's log for a lack of memory"
                )
        rank = min(reports, key=lambda rank: reports[rank]["time"])
        return f"rank {rank} failed:\n{reports[rank]['traceback']}"
