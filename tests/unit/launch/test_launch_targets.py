"""Launch targets: an extension's is planned and run like the core's, and an unknown name is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten import extension
from hasten.config.source import SettingEntry, SettingSource
from hasten.errors import ConfigError
from hasten.extension import Extension
from hasten.launch.base import (
    Host,
    LaunchPlan,
    LaunchRequest,
    LaunchTarget,
    PlannedFile,
    Proc,
    Submitter,
)
from hasten.launch.job import Job, prepare


def plan_job(request: LaunchRequest, host: Host) -> LaunchPlan:
    """Return the job file of an imaginary batch system."""
    job_file = PlannedFile("job.pbs", f"run {request.target.name}\n")
    return LaunchPlan(
        "pbs",
        (Proc(("qsub", "job.pbs")),),
        files=(job_file,),
        submitter=Submitter("qsub", "print it"),
    )


PBS = LaunchTarget(
    name="pbs",
    is_chosen=lambda request: request.config.launch.submit == "pbs",
    plan=plan_job,
)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a script on a machine whose extension offers the batch system."""
    pbs = Extension(
        name="pbs", summary="jobs of PBS", launch_targets={"pbs": f"{__name__}:PBS"}
    )
    monkeypatch.setattr(extension, "installed", lambda: (pbs,))
    path = tmp_path / "train.py"
    path.touch()
    return path


def job_of(script: Path, **values: str) -> Job:
    """Return the job of a script under these settings of a launch."""
    source = SettingSource("flag", "--submit")
    entries = [
        SettingEntry(("launch", name), value, source) for name, value in values.items()
    ]
    return prepare([str(script)], settings=entries, host=Host())


def test_a_target_of_an_extension_plans_the_job(script: Path) -> None:
    plan = job_of(script, submit="pbs").plan
    assert plan.launcher == "pbs"
    assert plan.files[0].text == f"run {script}\n"
    assert job_of(script, submit="slurm").plan.launcher == "slurm"
    assert job_of(script).plan.launcher != "pbs"


@pytest.mark.parametrize("setting", ["submit", "launcher"])
def test_an_unknown_name_is_refused_with_the_nearest_one(
    script: Path, setting: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{setting}='pbss'.* did you mean 'pbs'\?"):
        job_of(script, **{setting: "pbss"})
    with pytest.raises(
        ConfigError, match=rf"{setting}='fax'.* installed are .*pbs.* slurm"
    ):
        job_of(script, **{setting: "fax"})
