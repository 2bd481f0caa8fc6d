"""One thread that runs jobs in order, so that slow trackers cost the training loop nothing."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class Writer:
    """Runs jobs in order on a thread that starts with the first job and ends with `close`.

    Jobs must not raise. A full queue refuses a job instead of blocking: a hanging tracker never stops training.
    """

    def __init__(self, max_jobs: int = 1000) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(max_jobs)
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> bool:
        """Queue `job`; False when the queue is full and the job was refused."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="hasten-trackers", daemon=True)
            self._thread.start()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def drain(self, timeout_s: float) -> bool:
        """Wait until every job queued so far is done; False when that takes longer than `timeout_s`."""
        if self._thread is None:
            return True
        done = threading.Event()
        return self.put(done.set) and done.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Finish the queued jobs and end the thread; False when that takes longer than `timeout_s`."""
        if self._thread is None:
            return True
        thread, self._thread = self._thread, None
        try:
            self._jobs.put(None, timeout=timeout_s)
        except queue.Full:
            return False
        thread.join(timeout_s)
        return not thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
