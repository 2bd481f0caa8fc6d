"""What a machine says about itself: digests that change when the code, its imports or the settings change."""

from __future__ import annotations

from pathlib import Path

from hasten.config.root import Config
from hasten.config.sections.launch import LaunchConfig
from hasten.launch.base import Host, LaunchPlan, Meeting, Proc, Target
from hasten.launch.checkin import (
    changed_settings,
    code_digest,
    make_report,
    package_versions,
)


def test_the_digest_follows_imports_in_the_folder(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import json\nfrom model import Net\nimport pkg.deep\n")
    (tmp_path / "model.py").write_text("import layers\nclass Net: ...\n")
    (tmp_path / "layers.py").write_text("x = 1\n")
    (tmp_path / "notes.py").write_text("not imported\n")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/deep.py").write_text("y = 1\n")
    target = Target(str(script))
    first = code_digest(target)
    assert first == code_digest(target)
    (tmp_path / "notes.py").write_text("still not imported\n")
    assert code_digest(target) == first
    for name in ("layers.py", "pkg/deep.py", "model.py", "train.py"):
        initial_digest = code_digest(target)
        with (tmp_path / name).open("a") as file:
            file.write("z = 2\n")
        assert code_digest(target) != initial_digest, name


def test_programs_without_a_file_have_no_digest() -> None:
    assert code_digest(Target("nccl-tests", no_python=True)) == ""
    assert code_digest(Target("no_such_module_anywhere", module=True)) == ""
    assert code_digest(Target("hasten.testing.worker", module=True)) != ""


def test_broken_code_is_left_to_the_workers(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def (:\n")
    assert code_digest(Target(str(tmp_path / "bad.py"))) != ""


def test_settings_of_one_machine_are_not_compared() -> None:
    machine_config = Config(
        mixed_precision="bf16",
        launch=LaunchConfig(machine_rank=1, gpu_ids=(0,), log_dir="/x"),
    )
    assert dict(changed_settings(machine_config)) == {"mixed_precision": "'bf16'"}


def test_a_lone_machine_skips_the_digests() -> None:
    plan = LaunchPlan(
        "torchrun",
        (Proc(("x",)), Proc(("x",))),
        meeting=Meeting(),
        target=Target("a.py"),
    )
    lone_report = make_report(plan, Config(), Host(name="h", cores=4), is_alone=True)
    assert (lone_report.num_processes, lone_report.device, lone_report.versions) == (
        2,
        "cpu (4 cores)",
        {},
    )
    assert (
        make_report(plan, Config(), Host(name="h"), is_alone=False).versions
        == package_versions()
    )
    assert "torch" in package_versions()
