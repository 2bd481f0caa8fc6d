"""Manager of all trackers of one Accelerator: start, delivery of values, and resume."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from hasten.errors import HastenWarning, TrackerError
from hasten.tracking.base import Entry, ImageEntry, Resume, Run, TableEntry, Tracker
from hasten.tracking.values import (
    Deferred,
    Fetch,
    as_pixels,
    check_options,
    check_project,
    check_record,
    fetch_one_by_one,
    flatten_values,
    plain_config,
    plain_rows,
    snapshot_value,
)
from hasten.tracking.writer import DummyTracker, Record, TrackerWriter, Writer

log = logging.getLogger(__name__)

_VERSION = 1


@dataclass(slots=True)
class _Draft:
    """Log call whose tensors are still on their device; `options` are by tracker name."""

    values: dict[str, Any]
    step: int
    time_s: float
    options: Mapping[str, Mapping[str, Any]]

    def make_entry(self, tracker: str) -> Entry:
        """Return the entry for the tracker of this name, after the tensors were read."""
        options = self.options.get(tracker, {})
        return Entry(
            values=self.values, step=self.step, time_s=self.time_s, options=options
        )


class TrackerManager:
    """Dispatcher of values to the trackers of one process: deferred, in order, off the training thread, never raising.

    Ranks: exists on every rank; only the main process has active trackers.
    A tracker starts on first use, so that a checkpoint loaded before the first `log` continues its old run.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        *,
        is_main: bool = True,
        directory: Path | None = None,
        fetch: Fetch = fetch_one_by_one,
        flush_every_s: float = 2.0,
        max_pending: int = 1024,
    ) -> None:
        """Manage `trackers`; `fetch` reads many scalar tensors at once."""
        self.names = tuple(map(attrgetter("name"), trackers))
        self._notices: deque[str] = deque()
        self._tracker_writers: list[TrackerWriter] = []
        for tracker in trackers if is_main else ():
            self._tracker_writers.append(TrackerWriter(tracker, self._notices.append))
        self._directory = directory
        self._fetch = fetch
        self._flush_every_s = flush_every_s
        self._max_pending = max_pending
        self._writer = Writer(self._send_older, flush_every_s / 2)
        self._pending: deque[_Draft] = deque()
        self._sending = threading.Lock()
        self._flushed_at = float("-inf")
        self._run: Run | None = None
        self._init_kwargs: Mapping[str, Mapping[str, Any]] = {}
        self._resume: Mapping[str, Any] | None = None
        self._warned_topics: set[str] = set()
        self._started = self._logged = False
        self._step = -1
        self._pid = os.getpid()

    # ---- starting

    def check_directory(self) -> None:
        """Raise TrackerError if the trackers of this process cannot write to their folder."""
        existing_folder = folder = self._directory or Path("runs")
        while (
            not existing_folder.exists() and existing_folder != existing_folder.parent
        ):
            existing_folder = existing_folder.parent
        if self._tracker_writers and not (
            existing_folder.is_dir() and os.access(existing_folder, os.W_OK | os.X_OK)
        ):
            raise TrackerError(
                f"the trackers cannot write to {folder}, because {existing_folder} is no folder that can be written to; give another project_dir."
            )

    def init(
        self,
        project: str,
        config: Any = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start a run of `project`; trackers open on first use.

        A second call ends the first run and starts another. Ranks: every rank.
        """
        check_project(project)
        check_options("init_kwargs", init_kwargs)
        unknown_names = set(init_kwargs or ()) - set(self.names)
        if unknown_names:
            raise TrackerError(
                f"init_kwargs names {sorted(unknown_names)}, but the trackers are {list(self.names)}; these settings would be ignored. Use "
                "the names passed to log_with."
            )
        self.finish()
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        directory = self._directory or Path("runs")
        if self._directory is None and self._tracker_writers:
            log.info("trackers write to ./runs because no project_dir was given")
        self._run = Run(
            project=project,
            run_id=run_id,
            directory=directory,
            config=plain_config(config),
        )
        self._init_kwargs = init_kwargs or {}
        self._step = int(self._resume["step"]) if self._resume else -1

    def _start_trackers(self) -> None:
        if self._started or self._run is None:
            return
        self._started = True
        resumed_state = self._resume or {}
        tracker_run = replace(
            self._run, run_id=resumed_state.get("run_id", self._run.run_id)
        )
        run_ids: Mapping[str, str] = resumed_state.get("runs", {})
        for tracker_writer in self._tracker_writers:
            tracker_name = tracker_writer.tracker.name
            resume = None
            if tracker_name in run_ids:
                resume = Resume(
                    run_id=run_ids[tracker_name], step=int(resumed_state["step"])
                )
            tracker_writer.start(
                replace(
                    tracker_run,
                    options=self._init_kwargs.get(tracker_name, {}),
                    resume=resume,
                )
            )
        self._run = tracker_run
        # after the trackers' exit hooks were registered, so that this one runs before them
        atexit.register(self._at_exit)
        self._show_notices()

    # ---- logging

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record numbers and strings at `step` (default: one more than the last); tensors are read in a later flush."""
        check_record("log", values, step, log_kwargs)
        if not self._is_ready("log"):
            return
        plain_values: dict[str, Any] = {}
        for value_name, logged_value in flatten_values(values):
            if type(logged_value) in (float, int):  # the common value, on the hot path
                plain_values[value_name] = logged_value
                continue
            try:
                plain_values[value_name] = snapshot_value(value_name, logged_value)
            except TrackerError as error:
                self._warn_once(f"value {value_name}", str(error))
        now_s = time.time()
        self._pending.append(
            _Draft(plain_values, self._next_step(step), now_s, log_kwargs or {})
        )
        if (
            now_s - self._flushed_at >= self._flush_every_s
            or len(self._pending) >= self._max_pending
        ):
            self.send()
        else:
            self._writer.start()

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record images: arrays, tensors, PIL images, or batches and lists of them."""
        check_record("log_images", values, step, log_kwargs)
        if not self._is_ready("log_images"):
            return
        images = {}
        for value_name, logged_value in values.items():
            try:
                images[value_name] = as_pixels(value_name, logged_value)
            except TrackerError as error:
                self._warn_once(f"image {value_name}", str(error))
        if not images:
            return
        entry = ImageEntry(
            images=images, step=self._next_step(step), time_s=time.time()
        )
        self._post_entry(entry, log_kwargs or {})

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record a table, given as columns and rows or as a data frame."""
        check_record("log_table", {table_name: data}, step, log_kwargs)
        if not self._is_ready("log_table"):
            return
        if dataframe is not None:
            columns = list(map(str, dataframe.columns))
            data = dataframe.values.tolist()
        if columns is None or data is None:
            raise TrackerError(
                f"the table {table_name!r} has no content. Pass columns and data, or a dataframe."
            )
        rows = plain_rows(table_name, columns, data)
        entry = TableEntry(
            name=table_name,
            columns=list(columns),
            rows=rows,
            step=self._next_step(step),
            time_s=time.time(),
        )
        self._post_entry(entry, log_kwargs or {})

    def flush(self, timeout_s: float = 60.0) -> None:
        """Send everything logged so far to the trackers and wait until they have written it."""
        self.send()
        if not self._writer.wait_for_jobs(timeout_s):
            self._warn_once(
                "slow",
                f"the trackers did not keep up within {timeout_s:g} s; training continues.",
            )
        self._show_notices()

    def _is_ready(self, action: str) -> bool:
        if not self.names:
            return False
        if self._run is None:
            raise TrackerError(
                f"{action} was called before init_trackers, so the values cannot be logged. Call accelerator.init_trackers('project') "
                "once, on every rank."
            )
        self._start_trackers()
        self._show_notices()
        return bool(self._tracker_writers)

    def _next_step(self, step: int | None) -> int:
        """Return the step of this record; the highest step is saved in checkpoints."""
        self._logged = True
        record_step = self._step + 1 if step is None else int(step)
        self._step = max(self._step, record_step)
        return record_step

    def _post_entry(
        self,
        entry: ImageEntry | TableEntry,
        log_kwargs: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.send()
        self._put_records(
            lambda tracker_writer: [
                replace(entry, options=log_kwargs.get(tracker_writer.tracker.name, {}))
            ],
            1,
        )

    def send(self) -> None:
        """Read the pending tensors, all at once, and queue the records for the writer."""
        self._flushed_at = time.time()
        with self._sending:
            self._send_drafts(
                [self._pending.popleft() for _ in range(len(self._pending))]
            )

    def _send_older(self) -> None:
        """Send what was logged some time ago by a loop that does something else since; runs on the writer's thread.

        Newer tensors may not be computed yet on a stream that this thread does not wait for.
        """
        latest_time_s = time.time() - self._flush_every_s / 2
        drafts: list[_Draft] = []
        with self._sending:
            while self._pending and self._pending[0].time_s <= latest_time_s:
                drafts.append(self._pending.popleft())
            self._send_drafts(drafts)

    def _send_drafts(self, drafts: list[_Draft]) -> None:
        if not drafts:
            return
        deferred_values = [
            logged_value
            for draft in drafts
            for logged_value in draft.values.values()
            if isinstance(logged_value, Deferred)
        ]
        try:
            fetched_numbers = iter(
                self._fetch([logged_value.tensor for logged_value in deferred_values])
            )
        # a broken device: it will raise in the training loop, where it can be understood
        except Exception as error:
            self._notice_once(
                "fetch",
                f"values to log could not be read from their device: {error}. They were dropped.",
            )
            return
        for draft in drafts:
            for value_name, logged_value in draft.values.items():
                if isinstance(logged_value, Deferred):
                    draft.values[value_name] = next(fetched_numbers)
        self._put_records(
            lambda tracker_writer: [
                draft.make_entry(tracker_writer.tracker.name) for draft in drafts
            ],
            len(drafts),
        )

    def _put_records(
        self, records_of: Callable[[TrackerWriter], list[Record]], num_records: int
    ) -> None:
        def write_records() -> None:
            for tracker_writer in self._tracker_writers:
                tracker_writer.write(records_of(tracker_writer))

        if not self._writer.queue_job(write_records):
            for tracker_writer in self._tracker_writers:
                tracker_writer.lost += num_records
            self._notice_once(
                "full",
                "the trackers are far behind the training; records are dropped until they catch up.",
            )

    # ---- access

    @property
    def trackers(self) -> list[Tracker]:
        """The active trackers of this process, started."""
        self._start_trackers()
        return [tracker_writer.tracker for tracker_writer in self._tracker_writers]

    # Any: with unwrap, an object of a foreign package
    def get(self, tracker_name: str, unwrap: bool = False) -> Any:
        """Return the tracker called `name`, or with `unwrap` the object of its package.

        If the tracker is not active (away from the main process, or after a failed start), a dummy that does nothing is returned.

        Raises: TrackerError if no tracker has this name.
        """
        if tracker_name not in self.names:
            raise TrackerError(
                f"there is no tracker {tracker_name!r}; the trackers of log_with are {list(self.names)}."
            )
        self._start_trackers()
        for tracker_writer in self._tracker_writers:
            if tracker_writer.tracker.name == tracker_name and (
                tracker_writer.open or not self._started
            ):
                if unwrap:
                    return tracker_writer.tracker.native
                return tracker_writer.tracker
        return DummyTracker()

    # ---- ending and resuming

    def finish(self, failed: bool = False) -> None:
        """Write pending records and close every tracker; without a started run, do nothing."""
        if not self._started:
            return
        atexit.unregister(self._at_exit)
        self.send()
        if not self._writer.close(60.0):
            self._warn_once(
                "slow end",
                "the trackers did not finish writing within 60 s; the last records are lost.",
            )
        for tracker_writer in self._tracker_writers:
            tracker_writer.finish(failed)
        self._run = None
        self._resume = None
        self._init_kwargs = {}
        self._started = self._logged = False
        self._show_notices()

    def _at_exit(self) -> None:
        # a forked child shares the trackers with its parent
        if os.getpid() == self._pid:
            self.finish(failed=getattr(sys, "last_value", None) is not None)

    @property
    def step(self) -> int:
        """The last step that was logged; -1 before the first."""
        return self._step

    def state_dict(self) -> dict[str, Any]:
        """Return the ids of the runs and the last step, as JSON values; flushes first, so that files match the checkpoint."""
        if self._run is None:
            return {"version": _VERSION}
        if self._started:
            self.flush()
        run_ids = {
            tracker_writer.tracker.name: tracker_writer.run_id
            for tracker_writer in self._tracker_writers
            if tracker_writer.run_id is not None
        }
        return {
            "version": _VERSION,
            "project": self._run.project,
            "run_id": self._run.run_id,
            "step": self._step,
            "runs": run_ids,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the runs named in `state`: at the next start, or by rewinding the open run."""
        if "run_id" not in state:
            return
        if (
            self._started
            and self._run is not None
            and state["run_id"] != self._run.run_id
        ):
            if self._logged:
                self._warn_once(
                    "late resume",
                    f"a checkpoint of run {state['run_id']} was loaded after run {self._run.run_id} had started logging, so the curve "
                    "does not continue. Call load_state before the first log.",
                )
                return
            tracker_run = self._run
            kwargs = self._init_kwargs
            self.finish()
            self._run = tracker_run
            self._init_kwargs = kwargs
        elif self._started:
            self.send()
            self._rewind_trackers(int(state["step"]))
        self._resume = state
        self._step = int(state["step"])

    def _rewind_trackers(self, step: int) -> None:
        def rewind_all() -> None:
            for tracker_writer in self._tracker_writers:
                tracker_writer.rewind(step)

        self._writer.queue_job(rewind_all)

    # ---- warnings

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self._warned_topics:
            self._warned_topics.add(topic)
            warnings.warn(message, HastenWarning, stacklevel=4)

    def _notice_once(self, topic: str, message: str) -> None:
        """Warn at the next call of the training thread."""
        if topic not in self._warned_topics:
            self._warned_topics.add(topic)
            self._notices.append(message)

    def _show_notices(self) -> None:
        """Warn, on the training thread, about errors of the writer thread."""
        while self._notices:
            warnings.warn(self._notices.popleft(), HastenWarning, stacklevel=4)
