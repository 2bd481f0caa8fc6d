"""Real launches: processes start, fail, are killed, restart and end, and what is said about it.

The launcher runs inside the test's process where that is possible (torch is loaded already); where signals are sent to it,
it is a fork of a warm one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from torch.distributed import TCPStore

from hasten.cli.main import main

pytestmark = pytest.mark.timed


@pytest.fixture(scope="module", autouse=True)
def native_leftovers() -> None:
    """The first store of a process makes a pipe that its native library keeps forever: let it be made before we look."""
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and no settings file but the test's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HASTEN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path


def write(folder: Path, text: str) -> str:
    """A script with some text; its name."""
    (folder / "script.py").write_text(
        "import os, signal, sys, time\nrank = int(os.environ.get('RANK', 0))\n" + text
    )
    return "script.py"


def launch(*words: str) -> int:
    """Run `hasten launch` in this process and return its exit code."""
    return main(["launch", "--cpu", *words])


def alive(pids: list[int]) -> list[int]:
    """Those of the processes that still run."""
    return [
        pid for pid in pids if Path(f"/proc/{pid}/stat").exists() and _state(pid) != "Z"
    ]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # ended while we looked
        return "Z"


def wait_until(happened: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return when something has happened."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    """Those that still run after some seconds."""
    deadline = time.monotonic() + seconds
    while (left := alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_two_processes_really_run(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "names = 'WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE OMP_NUM_THREADS'.split()\n"
    text += "print(rank, *(os.environ[n] for n in names), sys.argv[1:], 'cpu' in os.environ['HASTEN_CONFIG'])"
    assert launch("--num-processes", "2", write(folder, text), "--lr", "3") == 0
    out, err = capfd.readouterr()
    threads = os.environ.get("OMP_NUM_THREADS")
    assert sorted(out.splitlines()) == [
        f"{r} 2 {r} 2 {threads} ['--lr', '3'] True" for r in (0, 1)
    ]
    assert "2 processes on 1 machine" in err
    assert re.search(
        rf"^0 +0-1 +{re.escape(socket.gethostname())} +127\.0\.0\.1 +cpu",
        err,
        re.MULTILINE,
    )
    assert "HASTEN_CONFIG" not in os.environ


# What the agent and the launcher add to the plan's variables, for every launch in the same way.
ADDED: Final = frozenset(
    (
        *(
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "GROUP_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        ),
        *(
            "ROLE_NAME",
            "ROLE_RANK",
            "ROLE_WORLD_SIZE",
            "TORCHELASTIC_ERROR_FILE",
            "TORCHELASTIC_MAX_RESTARTS",
        ),
        *(
            "TORCHELASTIC_RESTART_COUNT",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_SIGNALS_TO_HANDLE",
        ),
        *(
            "TORCHELASTIC_USE_AGENT_STORE",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "HASTEN_LAUNCHER_PID",
        ),
        "HASTEN_MEMORY_FOLDER",  # drawn for each launch
    )
)


@pytest.mark.parametrize(
    "words",
    [
        ["--num_processes=2"],
        ["--num_processes=1", "--max_restarts=1"],
        ["--num_processes=1"],
    ],
)
def test_what_the_dry_run_prints_is_what_runs(
    folder: Path, capfd: pytest.CaptureFixture[str], words: list[str]
) -> None:
    script = write(
        folder,
        "import json\njson.dump([sys.orig_argv, dict(os.environ)], open(f'seen-{rank}', 'w'))",
    )
    words = ["--num_cpu_threads_per_process=3", *words, script, "--lr", "a b"]
    assert launch("--dry-run", *words) == 0
    plan = capfd.readouterr().out
    command = re.split(r"^process.*:\n", plan, flags=re.MULTILINE)[1]
    printed = shlex.split(command.replace("\\\n", ""))
    count = 2 if "processes 0-1" in plan else 1
    assert launch(*words) == 0
    started = [json.loads(file.read_text()) for file in sorted(folder.glob("seen-*"))]
    assert len(started) == count
    for argv, env in started:
        new = {
            name: value
            for name, value in env.items()
            if os.environ.get(name) != value and name not in ADDED
        }
        assert [
            *(f"{name}={value}" for name, value in sorted(new.items())),
            *argv,
        ] == printed


def test_modules_programs_and_silence(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(folder, "print('module', __name__, rank)")
    assert launch("-q", "--num_processes=2", "-m", "script") == 0
    out, err = capfd.readouterr()
    assert (sorted(out.splitlines()), err) == (
        ["module __main__ 0", "module __main__ 1"],
        "",
    )
    assert (
        launch(
            "-q",
            "--num_processes=2",
            "--no_python",
            "sh",
            "-c",
            "echo program $RANK of $WORLD_SIZE",
        )
        == 0
    )
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "program 0 of 2",
        "program 1 of 2",
    ]


@pytest.mark.parametrize("flags", [(), ("--debug",)])
def test_the_first_traceback_comes_once_and_last(
    folder: Path, capfd: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    text = "if rank == 1:\n    try:\n        raise ValueError('boom')\n    except ValueError as e: sys.excepthook(type(e), e, e.__traceback__)\n    os._exit(7)\ntime.sleep(60)"
    assert launch("--num_processes", "2", *flags, write(folder, text)) == 7
    err = capfd.readouterr().err
    assert f"rank 1 on {socket.gethostname()}" in err
    assert "failed first: exit code 7" in err
    assert "rank 0: stopped by the launcher" in err
    assert err.count("Traceback (most recent call last)") == 1
    assert err.rstrip().splitlines()[-1] == "ValueError: boom"


def test_a_killed_process_is_named_with_its_signal(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    assert launch("--num_processes", "2", write(folder, text)) == 128 + signal.SIGKILL
    err = capfd.readouterr().err
    assert "failed first: killed by SIGKILL" in err
    assert "out-of-memory killer" in err


LEAVES_EARLY: Final = """
if rank == 0: sys.exit(0)
time.sleep(0.5)
raise RuntimeError('[gloo] Connection closed by peer [127.0.0.1]:4711')  # what the next collective says
"""


def test_a_rank_that_leaves_early_is_named_not_the_one_that_loses_it(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch("--num_processes", "2", write(folder, LEAVES_EARLY)) == 1
    err = capfd.readouterr().err
    assert re.search(
        r"rank 0 on \S+ \(pid \d+\) exited first, while other ranks still needed it: exit code 0",
        err,
    ), err
    assert "rank 1: exit code 1: RuntimeError: [gloo] Connection closed by peer" in err
    assert "hint: a rank that ends early" in err
    assert re.search(r"traceback of rank 1 on \S+, which lost the connection:", err)
    assert "failed first" not in err


def test_a_log_folder_that_cannot_be_written_is_told(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "file").write_text("")
    for log_dir in ("file", "file/below", "/proc/nowhere"):
        assert (
            launch("--num_processes", "2", "--log_dir", log_dir, write(folder, "")) == 2
        )
        err = capfd.readouterr().err
        assert f"log_dir='{log_dir}' cannot be written to (" in err
        assert "Traceback" not in err


def test_a_batch_script_that_cannot_be_written_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "sbatch").write_text("#!/bin/sh\nexit 0\n")
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    script = write(folder, "")
    (folder / f"{Path(script).stem}.sbatch").mkdir()
    assert launch("--submit", "slurm", script) == 1
    assert (
        "cannot be written (Is a directory), and without it the job cannot be submitted"
        in capfd.readouterr().err
    )


def test_a_taken_port_is_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert (
            launch(
                "--num_processes", "2", f"--main_process_port={port}", write(folder, "")
            )
            == 1
        )
    assert f"port {port} on 127.0.0.1 is already in use" in capfd.readouterr().err


def test_the_asked_port_is_the_one_workers_see(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    script = write(folder, "print(os.environ['MASTER_PORT'])")
    assert (
        launch("-q", "--num_processes", "2", f"--main_process_port={port}", script) == 0
    )
    assert capfd.readouterr().out.split() == [str(port)] * 2


@pytest.mark.filterwarnings(
    "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
)  # torch's open log files
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_logs_go_to_files_and_to_the_terminal(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = write(folder, "print('hello from', rank)")
    assert (
        launch("-q", "--num_processes", "2", "--log_dir", "logs", "--tee", "3", script)
        == 0
    )
    assert sorted(re.findall("hello from .", capfd.readouterr().out)) == [
        "hello from 0",
        "hello from 1",
    ]
    log_texts = sorted(
        file.read_text() for file in (folder / "logs").rglob("stdout.log")
    )
    assert log_texts == ["hello from 0\n", "hello from 1\n"]
    assert launch("-q", "--num_processes", "2", "-t", "3", script) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "[default0]:hello from 0",
        "[default1]:hello from 1",
    ]


def test_one_process_needs_no_agent(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        launch(
            write(
                folder,
                "print('torch' in sys.modules); raise RuntimeError('CUDA out of memory. Tried')",
            )
        )
        == 1
    )
    out, err = capfd.readouterr()
    assert out == "False\n"
    assert "hint: the device is out of memory: lower the batch size" in err
    assert err.rstrip().splitlines()[-1] == "RuntimeError: CUDA out of memory. Tried"
    assert launch(write(folder, "sys.exit(5)")) == 5
    assert launch(write(folder, "os.kill(os.getpid(), signal.SIGKILL)")) == 137
    assert "killed by SIGKILL" in capfd.readouterr().err


KILLS: Final = """
n = int(os.environ['TORCHELASTIC_RESTART_COUNT'])
if n < 20 and rank == n % 2:
    if n % 4 < 2: raise ValueError(f'boom {n}')
    os.kill(os.getpid(), (signal.SIGKILL, signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV)[n // 4 % 4])
if n < 20: time.sleep(60)
print('done', rank, 'after', n)
"""


def test_twenty_deaths_are_survived(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        launch(
            "-q", "--num_processes", "2", "--max_restarts", "20", write(folder, KILLS)
        )
        == 0
    )
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["done 0 after 20", "done 1 after 20"]
    assert [int(n) for n in re.findall(r"restart (\d+) of 20", err)] == list(
        range(1, 21)
    )
    blamed = [int(rank) for rank in re.findall(r"rank (\d) on .* failed first", err)]
    assert blamed == [n % 2 for n in range(20)]


def test_restarts_are_counted(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = write(folder, "if rank == 0: raise ValueError('again')\ntime.sleep(60)")
    assert launch("-q", "--num_processes", "2", "--max_restarts", "2", script) == 1
    err = capfd.readouterr().err
    assert err.count("ValueError: again") == 3
    assert "restart 2 of 2" in err
    assert "restart 3" not in err


GLOO: Final = """
import torch, torch.distributed as dist
from datetime import timedelta
n = int(os.environ['TORCHELASTIC_RESTART_COUNT'])
dist.init_process_group('gloo', timeout=timedelta(seconds=30))
total = torch.ones(1)
dist.all_reduce(total)
if n < 2:
    if rank == n % 2:
        if n % 2: raise ValueError('boom')
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(total)
    time.sleep(60)
print('sum', int(total))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_groups_form_anew_after_each_death(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        launch("-q", "--num_processes", "2", "--max_restarts", "2", write(folder, GLOO))
        == 0
    )
    assert capfd.readouterr().out.split() == ["sum", "2"] * 2


RESUMES: Final = """
import torch
from hasten import Accelerator
class Steps:
    done = 0
    def state_dict(self): return {'done': self.done}
    def load_state_dict(self, state): self.done = state['done']
accelerator, steps, model = Accelerator(), Steps(), torch.nn.Linear(2, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.register_for_checkpointing(steps)
if os.path.exists('saved'):
    accelerator.load_state('saved')
    print('resumed at', steps.done)
while steps.done < 6:
    if steps.done == 5 and rank == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.backward(model(torch.ones(2)).sum())
    optimizer.step()
    steps.done += 1
    if steps.done % 2 == 0: accelerator.save_state('saved')
print('finished', steps.done)
"""


@pytest.mark.slow
def test_a_killed_worker_loses_no_more_than_since_the_last_save(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        launch(
            "-q", "--num_processes", "2", "--max_restarts", "1", write(folder, RESUMES)
        )
        == 0
    )
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [
        "finished 6",
        "finished 6",
        "resumed at 4",
        "resumed at 4",
    ]
    assert "rank 1 on" in err
    assert "killed by SIGKILL" in err


SLEEPERS: Final = """
import subprocess
child = subprocess.Popen(['sleep', '100'])
with open(f'pids-{rank}.draft', 'w') as f: f.write(f'{os.getpid()} {child.pid}')
os.rename(f'pids-{rank}.draft', f'pids-{rank}')
time.sleep(100)
"""


@pytest.fixture(scope="module")
def zygote() -> Iterator[subprocess.Popen[str]]:
    """A process with torch loaded that forks launchers."""
    command = [
        sys.executable,
        str(Path(__file__).parents[2] / "support" / "launch_zygote.py"),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_launcher_leaves_no_orphans(
    zygote: subprocess.Popen[str], folder: Path, number: signal.Signals
) -> None:
    argv = ["launch", "--cpu", "--num_processes=2", write(folder, SLEEPERS)]
    output_file = folder / "said"
    order = {
        "namespace": "",
        "host": "",
        "folder": str(folder),
        "output": str(output_file),
        "argv": argv,
    }
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    zygote.stdin.write(json.dumps(order) + "\n")
    zygote.stdin.flush()
    launcher = int(zygote.stdout.readline())
    wait_until(lambda: len(list(folder.glob("pids-?"))) == 2)
    workers = [
        [int(pid) for pid in file.read_text().split()] for file in folder.glob("pids-?")
    ]
    os.kill(launcher, number)
    assert not wait_until_gone([launcher, *(program for program, _ in workers)])
    children = [child for _, child in workers]
    # the kernel ends the programs; their own children are out of everybody's reach
    if number == signal.SIGKILL:
        for child in children:
            os.kill(child, signal.SIGKILL)
        return
    assert int((folder / "said.code").read_text()) == 128 + number
    assert (
        f"{number.name}: all processes of this machine were ended"
        in output_file.read_text()
    )
    assert not wait_until_gone(children)


SAVES_WHEN_TOLD: Final = """
def save_and_leave(*_):
    time.sleep(float(sys.argv[1]))
    open(f'saved-{rank}', 'w').close()
    sys.exit(int(sys.argv[2]))
for number in (signal.SIGTERM, signal.SIGUSR1): signal.signal(number, save_and_leave)
open(f'ready-{rank}', 'w').close()
time.sleep(100)
"""


@pytest.mark.parametrize(
    ("number", "count", "takes", "leaves_with", "code"),
    [
        (signal.SIGTERM, 1, "0.3", 85, 85),
        (signal.SIGUSR1, 1, "0.3", 0, 85),
        (signal.SIGUSR1, 2, "0.3", 0, 85),
        (signal.SIGTERM, 2, "0.3", 85, 85),
        (signal.SIGTERM, 2, "0.3", 1, 128 + signal.SIGTERM),
        (signal.SIGTERM, 2, "60", 85, 128 + signal.SIGTERM),
    ],
)
def test_a_launcher_told_to_stop_lets_the_processes_save(
    zygote: subprocess.Popen[str],
    folder: Path,
    number: signal.Signals,
    count: int,
    takes: str,
    leaves_with: int,
    code: int,
) -> None:
    """The exit code of a preempted run reaches the scheduler, which then knows to start it again."""
    program = [write(folder, SAVES_WHEN_TOLD), takes, str(leaves_with)]
    argv = ["launch", "--cpu", f"--num_processes={count}", "--stop_grace_s=1", *program]
    order = {
        "namespace": "",
        "host": "",
        "folder": str(folder),
        "output": str(folder / "said"),
        "argv": argv,
    }
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    zygote.stdin.write(json.dumps(order) + "\n")
    zygote.stdin.flush()
    launcher = int(zygote.stdout.readline())
    wait_until(lambda: len(list(folder.glob("ready-?"))) == count)
    os.kill(launcher, number)
    assert not wait_until_gone([launcher])
    assert int((folder / "said.code").read_text()) == code
    assert len(list(folder.glob("saved-?"))) == (0 if takes == "60" else count)
    output = (folder / "said").read_text()
    assert ("; restart the job to continue" in output) == (code == 85)
    assert ("were ended" in output) == (code != 85)
    assert ("have saved and exited" in output) == (code == 85 and leaves_with == 85)
