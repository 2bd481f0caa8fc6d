"""`log_with="csv"`: the numbers of a run in a file of comma-separated values."""

from typing import TextIO

from hasten.extending import Entry, Run, Tracker


class CsvTracker(Tracker):
    """Writer of one line `step,name,value` for each number."""

    name = "csv"
    _file: TextIO

    def start(self, run: Run) -> str:
        run.directory.mkdir(parents=True, exist_ok=True)
        self._file = (run.directory / f"{run.project}.csv").open("a", encoding="utf-8")
        return super().start(run)

    def log(self, entry: Entry) -> None:
        for name, value in entry.numbers.items():
            self._file.write(f"{entry.step},{name},{value:g}\n")

    def flush(self) -> None:
        self._file.flush()

    def finish(self, failed: bool) -> None:
        self._file.close()
