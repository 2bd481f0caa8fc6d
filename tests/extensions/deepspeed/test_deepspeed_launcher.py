"""A script that DeepSpeed's own launcher starts trains as under ours and as one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hasten.extensions.deepspeed.engine import VERSIONS
from hasten.launch.network import free_port
from hasten.optional import available

pytestmark = [
    # three starts of DeepSpeed, about ten seconds each on a quiet machine
    pytest.mark.exhaustive,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not available("deepspeed", VERSIONS),
        reason=f"deepspeed{VERSIONS} is not installed",
    ),
]

SCRIPT = """
import json, sys, torch
from hasten import Accelerator, DeepSpeedPlugin
accelerator = Accelerator(strategy="deepspeed", cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
draw, losses = torch.Generator().manual_seed(1), []
for _ in range(6):
    x = torch.randn(16, 8, generator=draw).chunk(accelerator.num_processes)[accelerator.process_index]
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(accelerator.reduce(loss.detach(), "mean")))
if accelerator.is_main_process:
    print("RESULT", json.dumps([accelerator.num_processes, losses]), flush=True)
"""


def losses_of(words: list[str]) -> tuple[int, list[float]]:
    """How many processes trained, and their losses."""
    tools = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    tools |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=280, env=tools
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "RESULT " in line]
    count, losses = json.loads(line.partition("RESULT ")[2])
    return int(count), losses


def test_deepspeeds_launcher_starts_what_ours_does(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    single = losses_of([str(script)])
    port = str(free_port())
    by_deepspeed = losses_of(
        [
            "-m",
            "deepspeed.launcher.runner",
            "--num_accelerators",
            "2",
            "--master_port",
            port,
            str(script),
        ]
    )
    by_hasten = losses_of(
        [
            "-m",
            "hasten.cli.main",
            "launch",
            "--cpu",
            "--num_processes",
            "2",
            str(script),
        ]
    )
    assert (single[0], by_deepspeed[0], by_hasten[0]) == (1, 2, 2)
    assert by_deepspeed[1] == by_hasten[1]
    assert by_deepspeed[1] == pytest.approx(single[1], abs=1e-5)
