"""Runs scripts in processes forked from one that has imported the heavy libraries: seconds each instead of a quarter minute.

`Warm` is the caller's side. As a program this file is the forking process: `warm.py < requests`, one JSON object a line.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

# Where libraries import their parts on first use only, the parts that scripts use. What is not installed is left out.
PRELOAD: Final = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "datasets",
    "evaluate",
    "peft",
    "sklearn.metrics",
    "tensorboard",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "trl.trainer.sft_trainer",
)
LIMIT_S: Final = 240.0
GRACE_S: Final = 10.0  # what other ranks get to end by themselves when one has failed


@dataclass(frozen=True, slots=True)
class Done:
    """How a script ended: exit codes and outputs by rank."""

    codes: list[int]
    out: list[str]
    err: list[str]

    @property
    def failed(self) -> bool:
        """Whether any rank ended with an error."""
        return any(self.codes)


class Warm:
    """A process that stands ready to run scripts."""

    def __init__(self, python: str, env: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [python, __file__],
                env={**env, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def run(
        self,
        folder: Path,
        argv: list[str],
        processes: int = 1,
        env: Mapping[str, str] | None = None,
        limit_s: float = LIMIT_S,
    ) -> Done:
        """Run a script in `folder`, on one process or on several that find each other through the environment."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {
            "folder": str(folder),
            "argv": argv,
            "processes": processes,
            "env": dict(env or {}),
            "limit_s": limit_s,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the forking process ended: {self._log.read_text()[-2000:]}"
        out, err = (
            [(folder / f"{rank}.{kind}").read_text() for rank in range(processes)]
            for kind in ("out", "err")
        )
        return Done(json.loads(answer), out, err)

    def close(self) -> None:
        """End the process."""
        # an empty line: forks of this process may keep the pipe open
        self._process.communicate("\n")


def serve() -> None:
    """Import everything, then run what each line of standard input asks for."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    for name in PRELOAD:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # scripts collect often, and what was imported here stays
    while line := sys.stdin.readline().strip():
        answers.write(json.dumps(run(json.loads(line))) + "\n")
        answers.flush()


def run(request: dict[str, Any]) -> list[int]:
    """Fork the ranks of one script and wait for them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = request["processes"]
    pids = []
    for rank in range(processes):
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        pids.append(
            fork(request, rank, {**(env if processes > 1 else {}), **request["env"]})
        )
    return wait(pids, request["limit_s"])


def wait(pids: list[int], limit_s: float) -> list[int]:
    """The exit codes; ranks that outlive a failed one, or the limit, are killed."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + limit_s
    while len(codes) < len(pids):
        for pid in pids:
            if pid in codes:
                continue
            finished_pid, status = os.waitpid(pid, os.WNOHANG)
            if finished_pid:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


def fork(request: dict[str, Any], rank: int, env: dict[str, str]) -> int:
    """One rank, as if `python SCRIPT ARGUMENTS` had been called with its outputs in files."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.chdir(request["folder"])
        os.environ.update(env)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, kind in ((1, "out"), (2, "err")):
            os.dup2(
                os.open(f"{rank}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream
            )
        sys.argv = request["argv"]
        sys.path[0] = str(Path(sys.argv[0]).parent)
        sys.path[1:1] = [
            search_folder
            for search_folder in env.get("PYTHONPATH", "").split(os.pathsep)
            if search_folder
        ]
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = (
            error.code if isinstance(error.code, int) else int(error.code is not None)
        )
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # never back into the loop that serves requests


if __name__ == "__main__":
    serve()
