"""Several machines for real: network namespaces as hosts, each with its own launcher, and every bad end readable."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import cloudpickle
import pytest

from tests.support.machines import (
    NamespaceMachine,
    Zygote,
    machines,
    meet,
    warm_launcher,
    why_impossible,
)

pytestmark = [pytest.mark.slow, pytest.mark.timed]

ZYGOTE: Final = Path(__file__).parents[2] / "support" / "launch_zygote.py"


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A warm launcher; skips with the reason where hosts cannot be made."""
    if reason := why_impossible():
        pytest.skip(reason)
    with warm_launcher(ZYGOTE, tmp_path_factory.mktemp("home")) as process:
        yield process


def write(folder: Path, text: str) -> str:
    """A script with some text; its name."""
    (folder / "script.py").write_text(
        "import os, sys, time\nrank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
        + text
    )
    return "script.py"


def test_three_machines_in_the_order_of_their_ranks_then_a_wrong_rank(
    zygote: Zygote, tmp_path: Path
) -> None:
    with machines(zygote, 3) as hosts:
        script = write(tmp_path, "print('rank', rank, 'of', world)")
        # not the order of their names
        for m, rank in zip(hosts, (0, 2, 1), strict=True):
            m.start(tmp_path, [*meet(3), f"--machine_rank={rank}", script])
        exits = [m.end() for m in hosts]
        for m, rank in zip(hosts, (0, 1, 1), strict=True):
            m.start(tmp_path, [*meet(3), f"--machine_rank={rank}", script])
        wrong = [m.end() for m in hosts]
    assert [code for code, _ in exits] == [0, 0, 0], exits
    assert [
        f"rank {r} of 3" in text for r, (_, text) in zip((0, 2, 1), exits, strict=True)
    ] == [True] * 3
    for code, text in wrong:
        assert code == 1
        assert re.search(
            r"host-[bc] \(10.77.0.[23]\) and host-[bc] \(10.77.0.[23]\) both claim to be machine 1 of 3",
            text,
        )
        assert "Correct --machine_rank" in text
        assert "rank 0 of 3" not in text  # no user code has run


def test_two_machines_that_claim_rank_0_both_learn_why(
    zygote: Zygote, tmp_path: Path
) -> None:
    with machines(zygote, 2) as hosts:
        script = write(tmp_path, "print('user code')")
        for m in hosts:
            m.start(tmp_path, [*meet(2), "--machine_rank=0", script])
        exits = [m.end() for m in hosts]
    for code, text in exits:
        assert code == 1
        assert re.search(
            r"host-[ab] \(10.77.0.[12]\) and host-[ab] \(10.77.0.[12]\) both claim to be machine 0 of 2",
            text,
        ), text
        assert "recv" not in text
        assert "user code" not in text


@pytest.mark.parametrize("rank", [0, 1, None])
def test_a_host_name_that_cannot_be_resolved_is_named(
    zygote: Zygote, tmp_path: Path, rank: int | None
) -> None:
    with machines(zygote, 1) as (a,):
        words = [
            "--cpu",
            "--num_machines=2",
            "--main_process_ip=gpu7.invalid",
            f"--rdzv_conf=join_timeout={6 if rank == 1 else 1}",
        ]
        a.start(
            tmp_path,
            [
                *words,
                *([] if rank is None else [f"--machine_rank={rank}"]),
                write(tmp_path, ""),
            ],
        )
        code, text = a.end()
    assert code == 1
    assert "the host name 'gpu7.invalid' cannot be resolved on this machine" in text
    if rank == 1:
        assert "the name service does not know this name yet" in text


def test_different_settings_end_in_seconds(zygote: Zygote, tmp_path: Path) -> None:
    with machines(zygote, 2) as (a, b):
        script = write(tmp_path, "print('user code')")
        a.start(tmp_path, [*meet(2), "--mixed_precision=bf16", script])
        b.start(tmp_path, [*meet(2), script])
        exits = [a.end(), b.end()]
    for code, text in exits:
        assert code == 1
        assert (
            "the setting mixed_precision: 'bf16' on host-a; its default on host-b"
            in text
        )
        assert "user code" not in text


NEIGHBOURS: Final = """
import socket
print('rank', rank, 'of', world, flush=True)
if world == 1: sys.exit()
if rank == 0:
    server = socket.create_server(('', 5577))
    link = server.accept()[0]
    print('linked', flush=True)
    link.recv(1)
else:
    while True:
        try: link = socket.create_connection((os.environ['MASTER_ADDR'], 5577)); break
        except OSError: time.sleep(0.05)
    print('linked', flush=True)
    link.recv(1)
raise ConnectionResetError('the neighbour has gone')
"""


def test_a_machine_that_dies_is_named_by_the_others(
    zygote: Zygote, tmp_path: Path
) -> None:
    with machines(zygote, 2) as (a, b):
        script = write(tmp_path, NEIGHBOURS)
        for m in (a, b):
            m.start(tmp_path, [*meet(2), script])
        for m in (a, b):
            m.wait_for("linked")
        b.kill()
        start = time.monotonic()
        code, text = a.end()
        took = time.monotonic() - start
    assert code == 1
    assert took < 30
    assert (
        "machine 1 (host-b) no longer responds: probably the first failure, check it"
        in text
    )
    assert "rank 0 on host-a" in text
    assert text.count("Traceback") == 1


WORK: Final = """
import torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group('gloo', timeout=timedelta(seconds=2))
for step in range(10_000):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    if step == 5: print('rank', rank, 'of', world, 'sum', int(total), flush=True)
    time.sleep(0.02)
"""


def test_two_machines_with_the_same_command_and_different_counts_until_their_link_is_cut(
    zygote: Zygote, tmp_path: Path
) -> None:
    with machines(zygote, 2) as (a, b):
        script = write(tmp_path, WORK)
        a.start(tmp_path, [*meet(2), "--processes_per_machine=1", script])
        b.start(tmp_path, [*meet(2), "--processes_per_machine=2", script])
        for m, rank in ((a, 0), (b, 1), (b, 2)):
            m.wait_for(f"rank {rank} of 3 sum 3")
        b.unplug()
        start = time.monotonic()
        exits = [a.end(), b.end()]
        took = time.monotonic() - start
        left = a.processes + b.processes
    table = a.said
    assert "3 processes on 2 machines" in table
    assert re.search(r"^0 +0 +host-a +10\.77\.0\.1 ", table, re.MULTILINE)
    assert re.search(r"^1 +1-2 +host-b +10\.77\.0\.2 ", table, re.MULTILINE)
    for (code, text), lost, host_letter in zip(
        exits, ("machine 1 (host-b)", "machine 0 (host-a)"), "ab", strict=True
    ):
        assert code == 1
        assert (
            f"{lost} no longer responds: probably the first failure, check it" in text
        )
        assert re.search(
            rf"rank \d on host-{host_letter} \(pid \d+\) failed first", text
        )
        assert text.count("Traceback") == 1
    assert left == []
    assert took < 2 + 15  # the group's timeout, and a moment to ask the others why


TRAINING: Final = """
import torch
from hasten import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(4, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(10_000):
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    if step == 5: print('trains', flush=True)
    time.sleep(0.02)
"""


@pytest.mark.exhaustive
@pytest.mark.timeout(200)
def test_a_cut_link_under_a_training_is_reported_with_its_line(
    zygote: Zygote, tmp_path: Path
) -> None:
    """With default settings: both sides say so within 30 s and end long before the group's own timeout, half an hour."""
    with machines(zygote, 2) as (a, b):
        script = write(tmp_path, TRAINING)
        for m in (a, b):
            m.start(tmp_path, [*meet(2), "--processes_per_machine=1", script])
        for m in (a, b):
            m.wait_for("trains")
        b.unplug()
        cut = time.monotonic()
        a.wait_for("does not respond", 30)
        b.wait_for("lost contact with machine 0", 30)
        assert time.monotonic() - cut < 30
        exits = [a.end(90), b.end()]
        left = a.processes + b.processes
    line = TRAINING[: TRAINING.index("accelerator.backward")].count("\n") + 3
    assert f"rank 0: waits at script.py:{line} accelerator.backward" in exits[0][1]
    assert re.search(
        r"cause: rank 1 \(pid \d+ on host-b\) does not respond, nor does the launcher on host-b: the machine has failed",
        exits[0][1],
    )
    assert [code for code, _ in exits] == [86, 86]
    assert left == []


SIGNALLED_SCRIPT: Final = """
import signal
def tell(*_): open('told', 'w').close()
for number in (signal.SIGTERM, signal.SIGUSR1): signal.signal(number, tell)
open(f'ready-{rank}', 'w').close()
while not os.path.exists('told'): time.sleep(0.05)  # what ranks agree on by a collective
time.sleep(2.0 * (rank == int(sys.argv[1])))  # one machine saves longer than the other
sys.exit(85)
"""


@pytest.mark.parametrize(
    ("signalled", "slow"),
    [
        ((1,), 1),
        ((0, 1), 1),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (((0,), 0), ((0,), 1), ((0, 1), 0))
        ),
    ],
)
def test_machines_leave_with_the_same_code_when_some_are_told_to_stop(
    zygote: Zygote, tmp_path: Path, signalled: tuple[int, ...], slow: int
) -> None:
    """As under srun --kill-on-bad-exit: whoever is still there when the first has left gets SIGTERM, and that changes nothing."""
    write(tmp_path, SIGNALLED_SCRIPT)
    with machines(zygote, 2) as hosts:
        for i, host in enumerate(hosts):
            host.start(
                tmp_path,
                [
                    *meet(2),
                    f"--machine_rank={i}",
                    "--max_restarts=1",
                    "script.py",
                    str(slow),
                ],
            )
        wait_for_files(tmp_path, "ready-?", 2)
        for index in signalled:
            os.kill(hosts[index].launcher, signal.SIGUSR1)
        codes = [Path(f"{host.output}.code") for host in hosts]
        deadline = time.monotonic() + 60
        while not any(code.exists() for code in codes):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for host, code in zip(hosts, codes, strict=True):
            if not code.exists():
                os.kill(host.launcher, signal.SIGTERM)
        for host in hosts:
            code_, output = host.end()
            assert code_ == 85, output
            assert "restart 1" not in output


def wait_for_files(folder: Path, pattern: str, count: int) -> None:
    """Return when so many files are there."""
    deadline = time.monotonic() + 60
    while len(list(folder.glob(pattern))) < count:
        assert time.monotonic() < deadline, list(folder.iterdir())
        time.sleep(0.02)


def test_an_elastic_job_goes_on_without_a_lost_machine(
    zygote: Zygote, tmp_path: Path
) -> None:
    with machines(zygote, 2) as (a, b):
        script = write(tmp_path, NEIGHBOURS)
        flags = ["--nnodes=1:2", *meet(1)[1:], "--max_restarts=2"]
        conf = "--rdzv_conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2"
        for m in (a, b):
            m.start(tmp_path, [*flags, conf, script])
        for m in (a, b):
            m.wait_for("linked")
        b.kill()
        code, text = a.end()
    assert code == 0, text
    assert "restart 1 of 2" in text
    assert "1 process on 1 machine" in text
    assert "rank 0 of 1" in text


NOTEBOOK: Final = """
import json, sys
import nbformat
from nbclient import NotebookClient
cells = [nbformat.v4.new_code_cell(text) for text in json.loads(sys.argv[1])]
notebook = nbformat.v4.new_notebook(cells=cells)
NotebookClient(notebook, timeout=100, kernel_name="python3", allow_errors=True).execute()
print(json.dumps([cell["outputs"] for cell in notebook.cells]))
"""
CELLS: Final = (
    """
import os, socket, time
from hasten import notebook_launcher
def total(scale):  # of what all ranks say; without torch, which would take most of this test's time
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        server = socket.create_server(("", 5578))
        return sum(int(server.accept()[0].recv(9)) for _ in range(world - 1))
    while True:
        try: link = socket.create_connection((os.environ["MASTER_ADDR"], 5578)); break
        except OSError: time.sleep(0.05)
    link.sendall(str(scale * rank).encode())
def launch(node_rank):
    return notebook_launcher(
        total, (10,), 2, master_addr="10.77.0.1", node_rank=node_rank, num_nodes=2, use_port=29519, cpu=True)
""",
    "print('result', launch(NODE))",
    "launch(NODE + 2)",
)


def test_the_same_notebook_on_two_machines(zygote: Zygote, tmp_path: Path) -> None:
    """A real kernel on each host; two processes of each work together, and the first host gets the result."""
    env = {
        **os.environ,
        "HASTEN_HOME": str(tmp_path),
        "HF_HOME": str(tmp_path),
        "IPYTHONDIR": str(tmp_path),
    }
    kernels = []
    with machines(zygote, 2) as hosts:
        for node, m in enumerate(hosts):
            cells = json.dumps([cell.replace("NODE", str(node)) for cell in CELLS])
            shell = f'ip netns exec {m.namespace} unshare --uts sh -c "hostname {m.name} && exec \\"\\$@\\"" - "$@"'
            command = [
                "sh",
                "-c",
                shell,
                "-",
                sys.executable,
                "-W",
                "ignore",
                "-c",
                NOTEBOOK,
                cells,
            ]
            kernels.append(
                subprocess.Popen(
                    command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
                )
            )
        books = [json.loads(kernel.communicate(timeout=110)[0]) for kernel in kernels]
    for node, (setup, worked, wrong) in enumerate(books):
        assert setup == []
        printed_text = "".join("".join(output.get("text", "")) for output in worked)
        assert f"result {60 if node == 0 else None}\n" in printed_text
        assert wrong[-1]["ename"] == "LaunchError"
        assert (
            "give a machine_rank from 0 to 1. (In a notebook --machine_rank is node_rank"
            in wrong[-1]["evalue"]
        )


def write_call(folder: Path, function: Callable[[], object], source: str) -> str:
    """A notebook's function on its way to the processes; the folder it lies in."""
    folder.mkdir()
    (folder / "call.pkl").write_bytes(cloudpickle.dumps((function, (), {})))
    (folder / "source.txt").write_text(source)
    return folder.name


def test_every_notebook_of_a_job_is_told_why_it_failed(
    zygote: Zygote, tmp_path: Path
) -> None:
    def boom() -> None:
        if os.environ["RANK"] == "3":
            raise ValueError("boom in the cell")
        time.sleep(60)

    def verdicts(hosts: list[NamespaceMachine], words: list[list[str]]) -> list[str]:
        """What the launchers leave for their notebooks; all of them fail."""
        files = [f"verdict-{time.monotonic_ns()}" for _ in hosts]
        for m, launch_words, file in zip(hosts, words, files, strict=True):
            m.start(tmp_path, [*meet(2), *launch_words], HASTEN_VERDICT_FILE=file)
        assert [m.end()[0] for m in hosts] == [1] * len(hosts), [m.said for m in hosts]
        return [(tmp_path / file).read_text() for file in files]

    cell = ["--processes_per_machine=2", "-m", "hasten.launch.notebook"]
    first_call, second_call = (
        write_call(tmp_path / name, boom, name) for name in ("one", "two")
    )
    with machines(zygote, 2) as hosts:
        raised = verdicts(hosts, [[*cell, first_call], [*cell, first_call]])
        mismatched = verdicts(hosts, [[*cell, first_call], [*cell, second_call]])
        (missing,) = verdicts(
            hosts[:1],
            [["--machine_rank=0", "--rdzv_conf=join_timeout=1", *cell, first_call]],
        )
    sentence = r"rank 3 on host-b \(pid \d+\) failed: ValueError: boom in the cell \(its traceback is in the output above\)"
    assert all(re.fullmatch(sentence, words) for words in raised), raised
    assert [
        "the code of the notebook's function: " in words for words in mismatched
    ] == [
        True,
        True,
    ]
    assert "machine 1 of 2 did not check in within 1 s" in missing
