"""Hosts that are XLA worlds of their own train together: equal to plain torch on the big batch, resumed bit for bit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from tests.xla.host_program import NORM, ROWS, Branches, samples
from tests.xla.training import assert_equal, net, plain

# Any in this file: results of scenarios and their arguments, and what is in the program beside this file.

pytestmark = [
    # processes that load torch and torch_xla and compile each scenario
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.environ.get("CPU_NUM_DEVICES", "1") != "1",
        reason="hosts have two devices in either run",
    ),
]
PROGRAM: Final = Path(__file__).with_name("host_program.py")
ROOT: Final = PROGRAM.parents[2]
EXACT: Final = 1e-5
"""The order of sums differs between XLA's kernels and torch's, and between one batch and the mean of several."""

Training = tuple[int, int, float | None, bool]
"""Number of samples, micro-steps in a window, norm of clipping, whether parameters are sharded inside a host."""


def trainings(hosts: int) -> list[Training]:
    """Windows of 1 and 3, with and without clipping, parameters whole and sharded, samples that do not come out even."""
    even, uneven = 12 * ROWS * hosts, 12 * ROWS * hosts - 5
    if hosts == 3:
        return [(even, 3, None, False), (uneven, 1, 0.5, False)]
    return [
        (even, 1, None, False),
        (uneven, 3, 0.5, False),
        (even, 3, 0.5, True),
        (uneven, 1, None, True),
    ]


RESUMES: Final = [(1, 7, False), (3, 7, False), (3, 6, True)]
UNTRAINED_SCENARIOS: Final = {2: ["meet", "branches", "wrong"], 3: ["meet"]}


def free_port() -> int:
    """A port that nothing listens on now."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return int(server.getsockname()[1])


def environment(hosts: int, rank: int, port: int) -> dict[str, str]:
    """The variables of one of several hosts, which are all this machine."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "2",
        "RANK": str(rank),
        "WORLD_SIZE": str(hosts),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def end(process: subprocess.Popen[bytes]) -> None:
    """Make sure that a process has ended."""
    process.kill()
    process.wait()


def run_hosts(hosts: int, folder: Path, words: Sequence[str]) -> list[list[Any]]:
    """Run scenarios on several hosts; the results of each scenario, one for each host."""
    port = free_port()
    command = [sys.executable, str(PROGRAM), str(folder), *words]
    logs = [folder / f"{rank}.log" for rank in range(hosts)]
    with ExitStack() as stack:
        started = []
        for rank, log in enumerate(logs):
            out = stack.enter_context(log.open("w"))
            started.append(
                subprocess.Popen(
                    command, env=environment(hosts, rank, port), stdout=out, stderr=out
                )
            )
            stack.callback(end, started[-1])
        codes = [process.wait(timeout=550) for process in started]
    assert codes == [0] * hosts, [log.read_text()[-3000:] for log in logs]
    return [
        [torch.load(folder / f"{turn}.{rank}.pt") for rank in range(hosts)]
        for turn in range(len(words))
    ]


class Found:
    """The results of scenarios, one for each host; each world is started once, when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._worlds: dict[int, dict[tuple[Any, ...], list[Any]]] = {}

    def of(self, hosts: int, *key: Any) -> list[Any]:
        """The results of a scenario by its name and arguments."""
        if hosts not in self._worlds:
            self._worlds[hosts] = {}  # a world that failed is not started again
            keys: list[tuple[Any, ...]] = [
                ("train", *training) for training in trainings(hosts)
            ]
            keys += [("resume", *resume_case) for resume_case in RESUMES if hosts == 2]
            keys += [(name,) for name in UNTRAINED_SCENARIOS[hosts]]
            host_folder = self._folder / str(hosts)
            host_folder.mkdir()
            results = run_hosts(
                hosts,
                host_folder,
                [f"{name} {json.dumps(args)}" for name, *args in keys],
            )
            self._worlds[hosts] = dict(zip(keys, results, strict=True))
        return self._worlds[hosts][key]


@pytest.fixture(scope="module")
def host_results(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("hosts"))


@pytest.mark.parametrize(
    ("hosts", "training"),
    [(hosts, training_case) for hosts in (2, 3) for training_case in trainings(hosts)],
)
def test_hosts_equal_plain_torch_on_the_big_batch(
    hosts: int, training: Training, host_results: Found
) -> None:
    count, every, clip, _ = training
    results = host_results.of(hosts, "train", *training)
    steps = [
        list(groups)
        for groups in zip(
            *(host_result["rows"] for host_result in results), strict=True
        )
    ]
    read_rows = [row for groups in steps for rows in groups for row in rows]
    assert len(steps) == 12
    assert set(read_rows) == set(range(count))
    assert read_rows[:count] == list(range(count)), (
        "each once and in order, before those that fill the last batches"
    )
    if count == 12 * ROWS * hosts:
        assert len(read_rows) == count
        steps = [
            [list(range(start, start + ROWS * hosts))]
            for start in range(0, count, ROWS * hosts)
        ]
    reference = net(NORM)
    _, x, y = samples(count).tensors
    expected_losses = plain(reference, (x, y), steps, every, clip)
    losses = (
        torch.tensor([host_result["losses"] for host_result in results])
        .mean(0)
        .tolist()
    )
    assert losses == pytest.approx(expected_losses, abs=EXACT)
    assert expected_losses[-1] < expected_losses[0] - 0.5, "nothing was learned"
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(
            results[0]["numbers"][name], value, atol=EXACT, rtol=0, msg=name
        )
    for later_host in results[1:]:
        assert_equal(later_host["numbers"], results[0]["numbers"])


@pytest.mark.parametrize(("every", "stop", "shards"), RESUMES)
def test_hosts_resume_bit_for_bit(
    every: int, stop: int, shards: bool, host_results: Found
) -> None:
    """Also inside an accumulation window; dropout draws other numbers on each host."""
    results = host_results.of(2, "resume", every, stop, shards)
    for host_result in results:
        assert host_result["again"]["losses"] == host_result["whole"]["losses"][stop:]
        assert host_result["again"]["rows"] == host_result["whole"]["rows"][stop:]
        assert_equal(host_result["again"]["numbers"], host_result["whole"]["numbers"])
    assert results[0]["files"] == results[1]["files"]
    weights = [
        name
        for name in results[0]["files"]
        if name.startswith("model") and name.endswith(".safetensors")
    ]
    assert len(weights) == 1, results[0]["files"]


@pytest.mark.parametrize("hosts", [2, 3])
def test_metrics_and_collectives(hosts: int, host_results: Found) -> None:
    results = host_results.of(hosts, "meet")
    for rank, host_result in enumerate(results):
        assert host_result["world"] == (rank, hosts)
        assert host_result["numbers"] == list(range(21))
        assert host_result["names"] == [str(number) for number in range(21)]
        assert host_result["gathered"].tolist() == [
            gathered_number
            for host in range(hosts)
            for gathered_number in (float(host), 2.0)
        ]
        assert host_result["summed"].tolist() == [sum(range(hosts)), 2.0 * hosts]
        assert host_result["mean"].tolist() == [(hosts - 1) / 2, 2.0]
    assert not torch.equal(results[0]["drawn"], results[1]["drawn"]), (
        "set_seed(device_specific=True)"
    )


def test_gradients_that_some_hosts_have(host_results: Found) -> None:
    """A host without a gradient takes part with zeros; two backward passes add up; plain backward() is averaged too."""
    results = host_results.of(2, "branches")
    expected_gradients: dict[str, Tensor] = {}
    for rank, host_result in enumerate(results):
        model = Branches()
        model.load_state_dict(results[0]["before"])
        model(host_result["x"], rank == 0).square().mean().backward()
        model(host_result["x"] + 1, False).square().mean().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                expected_gradients[name] = (
                    expected_gradients.get(name, torch.zeros(())) + parameter.grad / 2
                )
    for host_result in results:
        assert [
            name for name, grad in host_result["grads"].items() if grad is None
        ] == [
            "never.weight",
            "never.bias",
        ]
        for name, grad in expected_gradients.items():
            torch.testing.assert_close(
                host_result["grads"][name], grad, atol=EXACT, rtol=0, msg=name
            )
    # the statistics of batch norm too, from the first host
    assert_equal(results[0]["after"], results[1]["after"])
    assert not torch.equal(
        results[0]["before"]["norm.running_mean"],
        results[0]["after"]["norm.running_mean"],
    )


def test_hosts_that_differ_are_told(host_results: Found) -> None:
    for messages in host_results.of(2, "wrong"):
        assert "PrepareError: in Linear, host 1 has weight (5, 4)" in messages["shapes"]
        assert (
            "PrepareError: in Sequential, host 1 has 1.weight (2, 2) torch.float32 where host 0 has nothing more"
            in messages["names"]
        )
        assert "norm.bias" in messages["weights"]
        assert "even_batches=True" in messages["join"]


@pytest.mark.parametrize("last", [0, 1])
def test_hosts_end_at_different_times(last: int, tmp_path: Path) -> None:
    """No barrier at the end of the script; the first host serves the store by which the others end."""
    start = time.monotonic()
    assert run_hosts(2, tmp_path, [f"late [{last}]"]) == [[last, last]]
    assert time.monotonic() - start < 250, (
        "torch looks for a store that is gone for five minutes"
    )


FAILING: Final = """
import torch
from hasten import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(4):
    loss = model(torch.ones(8, 4, device=accelerator.device)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if step == 2 and accelerator.process_index == FAILS:
        raise RuntimeError("this host has had enough")
print("trained", accelerator.strategy, accelerator.process_index, accelerator.num_processes, flush=True)
"""


def launched(folder: Path, fails: int) -> list[tuple[int, str]]:
    """Exit codes and output of `hasten launch --tpu` on two machines, which are both this one."""
    script = folder / "train.py"
    script.write_text(FAILING.replace("FAILS", str(fails)))
    port = free_port()
    meeting = [
        "--num_machines",
        "2",
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        str(port),
    ]
    env = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    command = [sys.executable, "-m", "hasten", "launch", "--tpu", *meeting]
    with ExitStack() as stack:
        started = []
        for rank in range(2):
            log = stack.enter_context((folder / f"{rank}.log").open("w"))
            words = [*command, "--machine_rank", str(rank), str(script)]
            started.append(subprocess.Popen(words, env=env, stdout=log, stderr=log))
            stack.callback(end, started[-1])
        codes = [process.wait(timeout=300) for process in started]
    return [
        (code, (folder / f"{rank}.log").read_text()) for rank, code in enumerate(codes)
    ]


def test_launch_on_two_machines(tmp_path: Path) -> None:
    for rank, (code, out) in enumerate(launched(tmp_path, fails=-1)):
        assert code == 0, out
        assert f"trained xla {rank} 2" in out


def test_an_exception_on_one_host_ends_both(tmp_path: Path) -> None:
    start = time.monotonic()
    (first, first_log), (second, failed) = launched(tmp_path, fails=1)
    assert first != 0, first_log
    assert second != 0, failed
    assert "this host has had enough" in failed
    assert time.monotonic() - start < 200
