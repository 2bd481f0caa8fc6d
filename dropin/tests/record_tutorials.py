"""Record what the first rank prints in every tutorial: record_tutorials.py FOLDER"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from warm import Warm

TUTORIALS = Path(__file__).parent / "tutorials"
# The plain loop and the settings file know one process; the notebook starts two by itself; a tracker made before the
# Accelerator lets the original take every process for the first one on CPUs (DIFFERENCES.md).
ALONE = ("basic_config", "course_mrpc_plain", "notebook_vision", "tracking")


def main(out: Path) -> None:
    """Every script on one process and, where it can, on two."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        warm = Warm(sys.executable, {**os.environ, "HF_HOME": str(work / "hub")}, work / "log")
        made = warm.run(work, [str(TUTORIALS / "make_hub.py"), str(work / "hub")])
        assert not made.failed, made.err
        for script in sorted(TUTORIALS.glob("*.py")):
            for processes in (1,) if script.stem in ALONE else (1, 2):
                if script.stem == "make_hub":
                    continue
                place = work / f"{script.stem}_{processes}"
                place.mkdir()
                done = warm.run(place, [str(script)], processes, {"PYTHONPATH": str(TUTORIALS / "stand_ins")})
                assert not done.failed, (script, done.codes, done.err)
                (out / f"{place.name}.txt").write_text(done.out[0])
        warm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
