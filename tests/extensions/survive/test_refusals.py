"""Settings that cannot lose replicas are refused, each with a reason and an alternative."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hasten import Accelerator
from hasten.config.resolve import resolve
from hasten.errors import ConfigError, MissingPackageError
from hasten.extensions.survive import part
from hasten.extensions.survive.settings import SurviveSettings
from hasten.launch import job
from hasten.optional import available

SURVIVE = SurviveSettings(
    lighthouse="127.0.0.1:1", replica="0", replicas=2, folder="absent"
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the settings as if torchft were installed."""
    monkeypatch.setattr(part, "check_installed", lambda *_: None)


@pytest.mark.skipif(available("torchft"), reason="torchft is installed here")
def test_a_missing_torchft_is_named_with_its_command() -> None:
    with pytest.raises(
        MissingPackageError,
        match=r"torchft.*continue when a replica is lost.*pip install",
    ):
        Accelerator(cpu=True, survive=SURVIVE)


@pytest.mark.skipif(available("torchft"), reason="torchft is installed here")
def test_the_launcher_names_a_missing_torchft(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(ConfigError, match=r"torchft.*--replicas.*pip install"):
        _prepared(script, "--replicas", "2")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"strategy": "deepspeed"},
            "strategy='deepspeed': the gradients .* Use strategy='ddp' or 'fsdp'",
        ),
        (
            {"strategy": "megatron"},
            "strategy='megatron': .* Use strategy='ddp' or 'fsdp'",
        ),
        ({"strategy": "xla"}, "strategy='xla': .* Use strategy='ddp' or 'fsdp'"),
        (
            {"parallelism_config": {"pp_size": 2}},
            "pp_size=2: the ranks of a replica .* Leave the sizes out",
        ),
        ({"parallelism_config": {"cp_size": 2}}, "cp_size=2: .* Leave the sizes out"),
        (
            {"parallelism_config": {"tp_size": 2, "dp_replicate_size": 2}},
            "dp_replicate_size=2, tp_size=2: .* Leave the sizes out",
        ),
        (
            {"mixed_precision": "fp16"},
            "mixed_precision='fp16': .* loss scale .* Use 'bf16'",
        ),
        ({"trust": {"numbers": "skip"}}, "trust.numbers='skip': .* Use 'report'"),
        ({"checkpoint_in_memory": 5}, "checkpoint_in_memory=5: .* Leave it out"),
        (
            {"gradient_accumulation_plugin": {"sync_each_batch": True}},
            "sync_each_batch=True: .* Leave it out",
        ),
    ],
)
def test_settings_that_cannot_be_combined(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        part.check_config(resolve(code={"survive": SURVIVE, **settings}, env={}).config)


@pytest.mark.usefixtures("installed")
def test_replicas_are_started_by_the_launcher() -> None:
    config = resolve(code={"survive": {"lighthouse": "127.0.0.1:1"}}, env={}).config
    with pytest.raises(ConfigError, match="start the script with `hasten launch"):
        part.check_config(config)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--replicas", "2", "--num_processes", "5"),
            "num_processes=5 counts the processes of all replicas.*Give a multiple of 2, such as 4",
        ),
        (
            ("--replicas", "2", "--submit", "kubernetes"),
            "submit=kubernetes.*Leave both out",
        ),
        (
            ("--replicas", "2", "--launcher", "slurm"),
            "launcher='slurm'.*Leave both out",
        ),
        (
            ("--replicas", "2", "--num_machines", "3"),
            "some of the 3 machines without.*at least as many replicas",
        ),
        (
            ("--replicas", "2", "--nnodes", "1:2"),
            "nnodes=1:2 asks for a changing one.*Give --num_machines",
        ),
        (
            ("--replicas", "2", "--min_replicas", "3"),
            "more than --replicas 2.*Give at most 2",
        ),
    ],
)
def test_launches_that_cannot_be(
    tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(ConfigError, match=words):
        _prepared(script, *flags)


def _prepared(script: Path, *flags: str) -> job.Job:
    from hasten.cli.launch_cmd import make_parser

    args = make_parser().parse_args([*flags, str(script)])
    return job.prepare([str(script)], settings=args.settings)
