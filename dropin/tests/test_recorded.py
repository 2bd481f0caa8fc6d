"""What scripts and libraries compute on the drop-in equals what they computed on the original package.

The numbers of the original lie in golden/, recorded by record.sh in an environment of its own. `make parity` runs all of
it under both packages; here, to save time, LoRA runs on one process and SFT on two.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def _parity() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_parity", HERE / "run_parity.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(tmp_path: Path, processes: int, *words: str) -> None:
    launcher = TWO if processes == 2 else ()
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "1",
        "HF_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, *launcher, *words],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("processes", [1, 2])
def test_small_scripts_equal_the_original(tmp_path: Path, processes: int) -> None:
    parity = _parity()
    out = tmp_path / "out.json"
    _run(tmp_path, processes, str(HERE / "run_parity.py"), "run", str(out))
    recorded = json.loads((GOLDEN / f"parity_{processes}.json").read_text())
    assert parity.unexplained(recorded, json.loads(out.read_text())) == []
    assert len(recorded) >= 30


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("client", "processes"), [("trainer", 1), ("trainer", 2), ("lora", 1), ("sft", 2)])
def test_libraries_equal_the_original(tmp_path: Path, client: str, processes: int) -> None:
    needed = {"trainer": "transformers", "lora": "peft", "sft": "trl"}[client]
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed (pip install 'hasten[clients]')")
    out = tmp_path / "out.json"
    _run(tmp_path, processes, str(HERE / "clients" / f"{client}.py"), str(tmp_path / "run"), str(out))
    recorded = json.loads((GOLDEN / f"{client}_{processes}.json").read_text())
    assert _parity().differences(recorded, json.loads(out.read_text())) == []
