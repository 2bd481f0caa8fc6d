"""Writer thread that runs jobs in order, so that slow trackers do not delay the training loop."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from hasten.errors import MissingPackageError
from hasten.tracking.base import Entry, ImageEntry, Run, TableEntry, Tracker

Job = Callable[[], None]


class Writer:
    """Runner of jobs in order on a thread that starts with the first job and ends with `close`.

    Jobs must not raise. A full queue rejects a job instead of blocking: a hanging tracker never stops training.
    """

    def __init__(self, when_idle: Job, idle_s: float, max_jobs: int = 1000) -> None:
        """Call `when_idle` on the thread whenever no job has come for `idle_s` seconds."""
        self._jobs: queue.Queue[Job | None] = queue.Queue(max_jobs)
        self._when_idle = when_idle
        self._idle_s = idle_s
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if it does not run."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_jobs, name="hasten-trackers", daemon=True
            )
            self._thread.start()

    def queue_job(self, job: Job) -> bool:
        """Queue `job`; returns False if the queue is full and the job was rejected."""
        self.start()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def wait_for_jobs(self, timeout_s: float) -> bool:
        """Wait until every job queued so far is done; returns False if that takes longer than `timeout_s`."""
        if self._thread is None:
            return True
        is_done = threading.Event()
        return self.queue_job(is_done.set) and is_done.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Finish the queued jobs and end the thread; returns False if that takes longer than `timeout_s`."""
        if self._thread is None:
            return True
        thread = self._thread
        self._thread = None
        try:
            self._jobs.put(None, timeout=timeout_s)
        except queue.Full:
            return False
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run_jobs(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._idle_s)
            except queue.Empty:
                job = self._when_idle
            if job is None:
                return
            job()


log = logging.getLogger(__name__)

Record = Entry | ImageEntry | TableEntry
Notify = Callable[[str], None]


class TrackerWriter:
    """Delivery of records to one tracker, which never raises."""

    def __init__(self, tracker: Tracker, notify: Notify) -> None:
        self.tracker = tracker
        self.run_id: str | None = None  # set while the tracker is open
        self.lost = 0
        self._notify = notify
        self._warned_actions: set[str] = set()

    @property
    def open(self) -> bool:
        """True if the tracker started and has not finished."""
        return self.run_id is not None

    def start(self, run: Run) -> None:
        """Open the tracker; if its service fails, it stays closed and its records are lost.

        Raises: MissingPackageError for a package without which it can never start.
        """

        def open_tracker() -> None:
            self.run_id = self.tracker.start(run)

        self._try_call("start", open_tracker, "nothing will be logged to it")

    def write(self, records: Sequence[Record]) -> None:
        """Log `records` in order, then flush."""
        if not self.open:
            self.lost += len(records)
            return
        for record in records:
            if not self._write_one(record):
                self.lost += 1
        self._try_call(
            "flush", self.tracker.flush, "the newest values may not be visible yet"
        )

    def rewind(self, step: int) -> None:
        """Rewind the tracker to `step`, since training was rolled back."""
        if self.open:
            self._try_call(
                "rewind",
                lambda: self.tracker.rewind(step),
                "the curve will show the repeated steps twice",
            )

    def finish(self, failed: bool) -> None:
        """Close the tracker and log the number of lost records."""
        if self.open:
            self._try_call(
                "finish",
                lambda: self.tracker.finish(failed),
                "its run may look unfinished",
            )
            self.run_id = None
        if self.lost:
            log.warning(
                "the tracker %r lost %d records of this run",
                self.tracker.name,
                self.lost,
            )
            self.lost = 0

    def _write_one(self, record: Record) -> bool:
        match record:
            case Entry():
                return self._try_call(
                    "log",
                    lambda: self.tracker.log(record),
                    "training continues without these values",
                )
            case ImageEntry():
                return self._try_call(
                    "log_images",
                    lambda: self.tracker.log_images(record),
                    "training continues",
                )
            case TableEntry():
                return self._try_call(
                    "log_table",
                    lambda: self.tracker.log_table(record),
                    "training continues",
                )

    def _try_call(
        self, action: str, call: Callable[[], None], consequence: str
    ) -> bool:
        try:
            call()
        except MissingPackageError:
            raise
        # any error of a foreign package: losing a curve is better than losing the training
        except Exception as error:
            log.debug(
                "tracker %r failed in %s", self.tracker.name, action, exc_info=error
            )
            if action not in self._warned_actions:
                self._warned_actions.add(action)
                self._notify(
                    f"the tracker {self.tracker.name!r} failed in {action}: {type(error).__name__}: {str(error).rstrip('.')}. "
                    f"Warned once; {consequence}."
                )
            return False
        return True


class DummyTracker:
    """Dummy that accepts any call and any attribute and does nothing; false in a condition."""

    def __getattr__(self, name: str) -> DummyTracker:
        # copy, pickle and inspect look for protocols; there are none
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: object, **kwargs: object) -> DummyTracker:
        return self

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "<tracker of another process>"
