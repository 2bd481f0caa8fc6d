"""Record what the first rank prints in every tutorial: record_tutorials.py FOLDER"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from warm import Warm

TUTORIALS = Path(__file__).parent / "tutorials"
# The original's notebook_launcher refuses to fork a process that has imported bitsandbytes, as the warm one has.
COLD = ("notebook_vision",)
# The plain loop and the settings file know one process; the notebook starts two by itself; a tracker made before the
# Accelerator lets the original take every process for the first one on CPUs (DIFFERENCES.md).
ALONE = ("basic_config", "course_mrpc_plain", "notebook_vision", "tracking")


def main(out: Path) -> None:
    """Every script on one process and, where it can, on two."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        env = {**os.environ, "HF_HOME": str(work / "hub")}
        warm = Warm(sys.executable, env, work / "log")
        made = warm.run(work, [str(TUTORIALS / "make_hub.py"), str(work / "hub")])
        assert not made.failed, made.err
        for script in sorted(TUTORIALS.glob("*.py")):
            for processes in (1,) if script.stem in ALONE else (1, 2):
                if script.stem == "make_hub":
                    continue
                place = work / f"{script.stem}_{processes}"
                place.mkdir()
                if script.stem in COLD:
                    printed = cold(place, script, env)
                else:
                    done = warm.run(place, [str(script)], processes, {"PYTHONPATH": str(TUTORIALS / "stand_ins")})
                    assert not done.failed, (script, done.codes, done.err)
                    printed = done.out[0]
                (out / f"{place.name}.txt").write_text(printed)
        warm.close()


def cold(folder: Path, script: Path, env: Mapping[str, str]) -> str:
    """What a script prints in a process of its own."""
    places = os.pathsep.join(filter(None, (str(TUTORIALS / "stand_ins"), env.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**env, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (script, done.stderr)
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
