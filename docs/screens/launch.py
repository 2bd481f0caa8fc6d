"""Capture the screens of docs/launch.md: real launches on this machine and, where allowed, on three network namespaces.

Run `python docs/screens/launch.py` from the root of the repository; the last screens need root and the command ip.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ZYGOTE = ROOT / "tests" / "support" / "launch_zygote.py"
HASTEN = [sys.executable, "-m", "hasten.cli.main"]

TRAIN = """\
import sys
import torch
from hasten import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(8, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
if accelerator.process_index == 1 and "--fail" in sys.argv:
    raise ValueError("the label 7 is not below num_classes=7")
accelerator.backward(model(torch.ones(4, 8)).mean())
optimizer.step()
accelerator.print(f"trained on {accelerator.num_processes} processes")
"""
KILLED = "import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)\n"


def save(name: str, text: str, title: str) -> None:
    """Write a screen as text and SVG."""
    text = text.replace(sys.executable, "python").rstrip() + "\n"
    text = re.sub(r"pid \d+", "pid 4242", text)
    (HERE / f"{name}.txt").write_text(text, "utf-8")
    console = Console(record=True, width=118, file=StringIO(), force_terminal=True)
    console.print(Text(text.rstrip()))
    console.save_svg(str(HERE / f"{name}.svg"), title=title)


def shell(folder: str, *commands: str) -> str:
    """Return the commands and their output."""
    env = {
        **os.environ,
        "HASTEN_HOME": folder,
        "HF_HOME": folder,
        "OMP_NUM_THREADS": "1",
    }
    told = ""
    for command in commands:
        words = [*HASTEN, *command.split()[1:]]
        done = subprocess.run(
            words,
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        told += f"$ {command}\n{done.stdout}" + (
            f"$ echo $?\n{done.returncode}\n" if done.returncode else ""
        )
    return told.replace(f"{folder}/", "")


def on_one_machine(folder: str) -> None:
    """Capture launches on this machine."""
    (Path(folder) / "train.py").write_text(TRAIN)
    (Path(folder) / "killed.py").write_text(KILLED)
    two = "hasten launch --cpu --num_processes 2"
    save("launch", shell(folder, f"{two} train.py"), "hasten launch")
    save("launch-failure", shell(folder, f"{two} train.py --fail"), "a rank raises")
    save("launch-killed", shell(folder, f"{two} killed.py"), "a rank is killed")
    save("launch-dry-run", shell(folder, f"{two} --dry-run train.py"), "the plan")
    save(
        "test",
        shell(folder, "hasten test --cpu --num_processes 2 --mixed_precision bf16"),
        "hasten test",
    )


def on_three_machines(folder: str) -> None:
    """Capture launches on three network namespaces, as in the tests."""
    from tests.support.machines import machines, warm_launcher

    script = "script.py"
    Path(folder, script).write_text(
        "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
    )
    with warm_launcher(ZYGOTE, Path(folder)) as zygote, machines(zygote, 3) as hosts:
        same = "--num_machines=3 --main_process_ip=10.77.0.1 --main_process_port=29517"
        told = []
        for flags in (("--processes_per_machine=1", "--processes_per_machine=2", "--processes_per_machine=1"), ("--machine_rank=0", "--machine_rank=1", "--machine_rank=1"), ("", "", "--mixed_precision=bf16")):  # fmt: skip
            for host, flag in zip(hosts, flags, strict=True):
                host.start(Path(folder), [*same.split(), *flag.split(), script])
            ends = [host.end() for host in hosts]
            told.append("\n".join(
                f"{host.name}$ hasten launch {same} {flag} {script}\n{text.rstrip()}"
                for host, flag, (_, text) in zip(hosts, flags, ends, strict=True)
            ))  # fmt: skip
    for name, text, title in zip(
        ("launch-machines", "launch-wrong-rank", "launch-mismatch"),
        told,
        (
            "three machines, the same command",
            "a wrong --machine_rank",
            "settings that differ",
        ),
        strict=True,
    ):
        save(name, text.replace("  script.py", " script.py"), title)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # for tests.support
    with tempfile.TemporaryDirectory() as home:
        on_one_machine(home)
        on_three_machines(home)
