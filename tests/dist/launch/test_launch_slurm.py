"""Jobs under a real SLURM of two nodes: told to stop in every way SLURM has, they save, go back into the queue and end as if never stopped.

The nodes are two daemons on this machine, started and stopped by `slurm_cluster.py`. Where SLURM is not installed the tests are
skipped with the reason. `make test-slurm` runs all of them, also those that must wait for a time limit of a minute.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from hasten import Accelerator
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool

pytestmark = [pytest.mark.slow, pytest.mark.timed]

CLUSTER: Final = Path(__file__).with_name("slurm_cluster.py")
TRAIN: Final = Path(__file__).with_name("slurm_train.py")
long = pytest.mark.skipif(
    "HASTEN_TEST_SLURM" not in os.environ, reason="takes long: run `make test-slurm`"
)

# Counts to 30 over all its starts. Rank 1 takes longer to save, so that the first machine is ready to leave before the second.
COUNT: Final = """
import os, signal, sys, time
from pathlib import Path

told, rank, folder = [], int(os.environ["RANK"]), Path(sys.argv[1])
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: told.append(number))
saved = folder / f"saved-{rank}"
count = int(saved.read_text()) if saved.exists() else 0
with (folder / f"counted-{rank}").open("a") as counted:
    while count < 30:
        count += 1
        print(count, file=counted, flush=True)
        time.sleep(0.1)
        if told:
            time.sleep(1.5 * rank)
            saved.write_text(str(count))
            sys.exit(85)
    print("end", file=counted, flush=True)
"""


def run(env: dict[str, str], *argv: str, cwd: Path | None = None) -> str:
    """What a command prints."""
    done = subprocess.run(argv, env=env, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which SLURM's commands reach the daemons."""
    cluster = runpy.run_path(str(CLUSTER))
    if reason := cluster["missing"]():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    outside = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SBATCH_"))
    }
    env = {
        **outside,
        "PATH": cluster["PATH"],
        "HASTEN_HOME": str(folder),
        "HF_HOME": str(folder),
    }
    command = [sys.executable, str(CLUSTER), str(folder)]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as daemons:
        assert daemons.stdin is not None
        assert daemons.stdout is not None
        try:
            assert daemons.stdout.readline() == "ready\n"
            yield {**env, "SLURM_CONF": str(folder / "slurm.conf")}
        finally:
            daemons.stdin.close()
            daemons.wait(60)


@dataclass(slots=True)
class Job:
    """A submitted job (or one task of an array) and the folder its program writes to."""

    env: dict[str, str]
    number: str
    folder: Path
    hurried: int = 0
    """How many times it has been started again without waiting."""

    def lines(self, rank: int = 0, name: str = "counted") -> list[str]:
        """What a rank has written."""
        file = self.folder / f"{name}-{rank}"
        return file.read_text().splitlines() if file.exists() else []

    def wait(self, happened: Callable[[], bool], seconds: float = 100.0) -> None:
        """Return when it has happened; a requeued job is started now, not after the two minutes SLURM waits by itself."""
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, f"{self.show()}\n{self.log()}"
            if (
                f"Restarts={self.hurried + 1}" in (job_state := self.show())
                and "Reason=BeginTime" in job_state
            ):
                self.hurried += 1
                run(
                    self.env,
                    "scontrol",
                    "update",
                    f"job={self.number}",
                    "StartTime=now+2",
                )
            time.sleep(0.1)

    def wait_for_more(self, rank: int = 1, name: str = "counted") -> None:
        """Return when the program has gone on for some steps."""
        num_lines = len(self.lines(rank, name))
        self.wait(lambda: len(self.lines(rank, name)) > num_lines + 2)

    def wait_for_requeue(self, times: int) -> None:
        """Return when the job has gone back into the queue so often."""
        self.wait(lambda: f"Restarts={times}" in self.show())

    def show(self) -> str:
        """What SLURM knows of the job."""
        return run(self.env, "scontrol", "show", "job", self.number)

    def log(self) -> str:
        """What the job has printed."""
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("log*")))

    def cancel(self, *words: str) -> None:
        """Call scancel for it."""
        run(self.env, "scancel", *words, self.number)


def submit(
    slurm: dict[str, str],
    folder: Path,
    *words: str,
    options: str = "",
    program: str = COUNT,
) -> Job:
    """Submit a job of two machines by `hasten launch --submit slurm`."""
    (folder / "program.py").write_text(program)
    flags = [
        "--cpu",
        "--num_machines=2",
        "--submit=slurm",
        f"--submit_options=output=log-%j,{options}".rstrip(","),
    ]
    command = [
        sys.executable,
        "-m",
        "hasten.cli.main",
        "launch",
        *flags,
        *words,
        "program.py",
        str(folder),
    ]
    return Job(slurm, run(slurm, *command, cwd=folder).split()[-1], folder)


def has_begun(job: Job) -> bool:
    """Whether the program has counted some steps."""
    return len(job.lines(1)) > 2


def check_count(job: Job, last: int = 30) -> None:
    """Every rank counts each number once, to the end."""
    job.wait(lambda: all(job.lines(rank)[-1:] == ["end"] for rank in range(2)))
    for rank in range(2):
        assert job.lines(rank) == [*map(str, range(1, last + 1)), "end"], job.log()


def undisturbed(ctx: ProcessContext, script: str, folder: str) -> None:
    """The same training in the pool's processes, without an interruption."""
    runpy.run_path(script)["train"](Accelerator(context=ctx, project_dir=folder))


@pytest.mark.timeout(300)
def test_a_training_told_to_stop_twice_ends_with_the_same_weights(
    slurm: dict[str, str], tmp_path: Path, rank_pool: Pool
) -> None:
    undisturbed_folder, run_folder = tmp_path / "whole", tmp_path / "run"
    undisturbed_folder.mkdir()
    run_folder.mkdir()
    rank_pool.run(undisturbed, 2, str(TRAIN), str(undisturbed_folder))
    job = submit(slurm, run_folder, program=TRAIN.read_text())
    job.wait_for_more(name="seen")
    # all ranks, and every launcher twice: by SLURM and by the batch shell
    job.cancel("--signal=USR1", "--full")
    job.wait_for_requeue(1)
    job.wait_for_more(name="seen")
    job.cancel("--signal=TERM", "--batch")  # the batch shell alone
    job.wait_for_requeue(2)
    job.wait(
        lambda: all(job.lines(rank, "seen")[-1].startswith("end") for rank in range(2))
    )
    for rank in range(2):
        assert (
            job.lines(rank, "seen")
            == (undisturbed_folder / f"seen-{rank}").read_text().splitlines()
        )


@long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "words",
    ["--signal=USR1", "--signal=TERM", "--signal=USR1 --batch", "--signal=USR1 --full"],
)
def test_every_way_of_telling_ends_in_the_queue(
    slurm: dict[str, str], tmp_path: Path, words: str
) -> None:
    job = submit(slurm, tmp_path)
    job.wait_for_more()
    job.cancel(*words.split())
    job.wait_for_requeue(1)
    check_count(job)


@pytest.mark.timeout(300)
def test_a_cancelled_job_saves_and_stays_cancelled(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    job = submit(slurm, tmp_path)
    job.wait_for_more()
    job.cancel()
    job.wait(lambda: "JobState=CANCELLED" in job.show())
    assert "Restarts=0" in job.show()
    assert (tmp_path / "saved-1").exists()


@long
@pytest.mark.timeout(300)
def test_a_job_that_was_preempted_goes_on(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    job = submit(slurm, tmp_path, options="partition=low")
    job.wait_for_more()
    run(
        slurm,
        "sbatch",
        "--partition=high",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=sleep 2",
    )
    job.wait_for_requeue(1)
    check_count(job)


@long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "options",
    [
        "time=2,signal=USR1@60",
        "time=2,signal=B:USR1@60",
        "time=2,signal=B:TERM@60",
        "time=1",
    ],
)
def test_a_job_whose_time_is_up_goes_on_from_there(
    slurm: dict[str, str], tmp_path: Path, options: str
) -> None:
    endless = COUNT.replace("count < 30", 'not (folder / "finish").exists()')
    job = submit(slurm, tmp_path, options=options, program=endless)
    job.wait(lambda: "Restarts=1" in job.show(), seconds=180)
    saved = int((tmp_path / "saved-1").read_text())
    job.wait(lambda: len(job.lines(1)) > saved + 2)
    (tmp_path / "finish").touch()
    job.wait(lambda: all(job.lines(rank)[-1:] == ["end"] for rank in range(2)))
    for rank in range(2):
        numbers = job.lines(rank)[:-1]
        assert numbers == [*map(str, range(1, len(numbers) + 1))]


@long
@pytest.mark.timeout(400)
def test_one_task_of_an_array_goes_back_into_the_queue_alone(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    program = COUNT.replace(
        "sys.argv[1])", 'sys.argv[1], os.environ["SLURM_ARRAY_TASK_ID"])'
    )
    for task in "01":
        (tmp_path / task).mkdir()
    array = submit(
        slurm, tmp_path, options="array=0-1,oversubscribe=true", program=program
    )
    tasks = [Job(slurm, f"{array.number}_{task}", tmp_path / task) for task in "01"]
    for job in tasks:
        job.wait(partial(has_begun, job))
    signalled_task = tasks[1]  # the last task has the number of the whole array
    signalled_task.cancel("--signal=USR1")
    signalled_task.wait_for_requeue(1)
    for job in tasks:
        check_count(job)
    assert "Restarts=0" in tasks[0].show()


@long
@pytest.mark.timeout(300)
def test_ranks_that_srun_started_leave_together(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(COUNT)
    command = [
        sys.executable,
        "-m",
        "hasten.cli.main",
        "launch",
        "--cpu",
        str(program),
        str(tmp_path),
    ]
    words = [
        "srun",
        "--job-name=ranks",
        "--nodes=2",
        "--ntasks=4",
        "--overcommit",
        "--kill-on-bad-exit=1",
        *command,
    ]
    with subprocess.Popen(words, env=slurm, stderr=subprocess.PIPE, text=True) as step:
        deadline = time.monotonic() + 30
        while not (
            number := run(slurm, "squeue", "--noheader", "--name=ranks", "--format=%i")
        ):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        job = Job(slurm, number, tmp_path)
        job.wait(lambda: all(len(job.lines(rank)) > 2 for rank in range(4)))
        job.cancel("--signal=USR1")
        _, step_errors = step.communicate(timeout=60)
    assert step.returncode == 85, step_errors
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(4))
