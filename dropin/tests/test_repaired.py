"""Defects of the original that are repaired here, not copied (DIFFERENCES.md lists them)."""

from __future__ import annotations

import argparse
import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.utils.data import DataLoader, TensorDataset

from accelerate import (
    Accelerator,
    ParallelismConfig,
    notebook_launcher,
    skip_first_batches,
)
from accelerate._impl.commands import launch
from accelerate._impl.commands.launch_flags import words_of
from accelerate.commands import env
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2
from accelerate.data_loader import DataLoaderShard
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration, write_basic_config
from accelerate.utils.memory import find_executable_batch_size
from hasten.tracking.registry import installed_trackers, tracker_names

pytestmark = pytest.mark.usefixtures("fresh_states")


def test_a_break_leaves_no_loader_active() -> None:
    loader = Accelerator(cpu=True).prepare(
        DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
    )
    for _ in loader:
        assert GradientState().in_dataloader
        break
    assert not GradientState().in_dataloader


def test_skipping_keeps_every_setting() -> None:
    loader = Accelerator(cpu=True).prepare(
        DataLoader(TensorDataset(torch.arange(8)), batch_size=2, drop_last=True)
    )
    skipped = skip_first_batches(loader, 1)
    assert isinstance(skipped, DataLoaderShard)
    assert (skipped._drop_last, skipped.device, len(skipped)) == (
        loader._drop_last,
        loader.device,
        3,
    )


def test_the_counter_of_checkpoints_comes_back(tmp_path: Path) -> None:
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=config)
    accelerator.prepare(nn.Linear(1, 1))
    accelerator.save_state()
    accelerator.save_state()
    AcceleratorState._reset_state(True)
    resumed = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            str(tmp_path), automatic_checkpoint_naming=True
        ),
    )
    resumed.prepare(nn.Linear(1, 1))
    resumed.load_state()
    assert resumed.save_iteration == 2
    assert Path(resumed.save_state()).name == "checkpoint_2"


def test_the_order_of_the_next_epoch_comes_back(tmp_path: Path) -> None:
    """Several processes shuffle with a generator of the loader's own; here the loader is given one."""

    def make() -> tuple[Accelerator, DataLoader[tuple[torch.Tensor]]]:
        AcceleratorState._reset_state(True)
        fresh_accelerator = Accelerator(cpu=True)
        generator = torch.Generator().manual_seed(5)
        data = TensorDataset(torch.arange(8))
        return fresh_accelerator, fresh_accelerator.prepare(
            DataLoader(data, batch_size=2, shuffle=True, generator=generator)
        )

    accelerator, loader = make()
    list(loader)
    accelerator.save_state(str(tmp_path / "between"))
    order = []
    for number, (x,) in enumerate(loader):
        order.append(x.tolist())
        if number == 1:
            accelerator.save_state(str(tmp_path / "within"))
    for checkpoint_name in ("between", "within"):
        accelerator, loader = make()
        accelerator.load_state(str(tmp_path / checkpoint_name))
        remaining = (
            skip_first_batches(loader, 2) if checkpoint_name == "within" else loader
        )
        assert [x.tolist() for (x,) in remaining] == order[-len(remaining) :]


def test_a_reduction_given_in_parentheses_is_used() -> None:
    tried = []

    @find_executable_batch_size(
        starting_batch_size=8, reduce_batch_size_fn=lambda size: size // 4
    )
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > 2:
            raise RuntimeError("CUDA out of memory.")
        return batch_size

    assert train() == 2
    assert tried == [8, 2]


def test_sizes_of_a_mesh_go_to_json() -> None:
    assert (
        json.loads(ParallelismConfig(dp_shard_size=2, tp_size=2).to_json())["tp_size"]
        == 2
    )


def test_no_word_of_a_flag_means_yes_by_mistake() -> None:
    parser = launch_command_parser()
    args = parser.parse_args(
        [
            "--megatron_lm_sequence_parallelism",
            "False",
            "--num-processes",
            "2",
            "--cpu",
            "run.py",
            "--x",
            "1",
        ]
    )
    assert words_of(args) == [
        "--cpu=true",
        "--num_processes=2",
        "--megatron_lm_sequence_parallelism=False",
        "run.py",
        "--x",
        "1",
    ]
    parent = argparse.ArgumentParser()
    assert (
        launch_command_parser(parent.add_subparsers()).get_default("func") is not None
    )


def test_settings_files_round_trip_and_convert(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "config.yaml"
    assert write_basic_config("bf16", str(file)) == file
    assert write_basic_config("bf16", str(file)) is False
    assert load_config_from_file(str(file)).mixed_precision == "bf16"
    file.write_text(yaml.safe_dump({"distributed_type": "NO", "typo": 1}))
    with pytest.raises(ValueError, match="unknown keys"):
        load_config_from_file(str(file))
    converted = convert_config_to_fsdp2(
        {
            "distributed_type": "FSDP",
            "fsdp_config": {
                "fsdp_sharding_strategy": "SHARD_GRAD_OP",
                "fsdp_use_orig_params": True,
            },
        }
    )
    assert converted["fsdp_config"] == {
        "fsdp_reshard_after_forward": False,
        "fsdp_version": 2,
    }
    assert len(caplog.records) == 1


def test_a_built_in_tracker_records_settings_and_values(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    accelerator = Accelerator(
        cpu=True, log_with="tensorboard", project_dir=str(tmp_path)
    )
    accelerator.init_trackers("run", config={"lr": 0.1})
    accelerator.log({"loss": torch.tensor(1.5), "nested": {"accuracy": 0.5}}, step=1)
    assert accelerator.get_tracker("tensorboard").name == "tensorboard"
    accelerator.end_training()
    assert any(path.name.startswith("events.out") for path in tmp_path.rglob("*"))


def test_a_tracker_without_its_package_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = next(
        (name for name in tracker_names() if name not in installed_trackers()), None
    )
    if gone is None:
        pytest.skip("the packages of all trackers are installed")
    with (
        caplog.at_level(logging.DEBUG, "accelerate.tracking"),
        pytest.warns(UserWarning, match="no supported trackers"),
    ):
        accelerator = Accelerator(cpu=True, log_with=gone, project_dir=str(tmp_path))
    assert accelerator.log_with == []
    assert (
        f"Tried adding logger {gone}, but package is unavailable in the system."
        in caplog.text
    )


def train(factor: int) -> tuple[int, int, str, str]:
    accelerator = Accelerator()
    return (
        factor,
        accelerator.num_processes,
        accelerator.mixed_precision,
        AcceleratorState().mixed_precision,
    )


def test_precision_given_to_a_notebook_reaches_its_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert notebook_launcher(train, (3,), num_processes=1, mixed_precision="bf16") == (
        3,
        1,
        "bf16",
        "bf16",
    )
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ
    with pytest.raises(ValueError, match="inside your training function"):
        notebook_launcher(train, (3,), num_processes=2)
    AcceleratorState._reset_state(True)
    with pytest.raises(ValueError, match="Unknown mixed_precision mode: bf17"):
        notebook_launcher(train, (3,), num_processes=2, mixed_precision="bf17")


@pytest.mark.exhaustive
def test_precision_given_to_a_notebook_reaches_two_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert notebook_launcher(train, (3,), num_processes=2, mixed_precision="bf16") == (
        3,
        2,
        "bf16",
        "bf16",
    )


def fail_on_the_second() -> None:
    if Accelerator().process_index == 1:
        raise ValueError("what the second process says")


@pytest.mark.exhaustive
def test_a_failed_process_of_a_notebook_is_torchs_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    with pytest.raises(
        ChildFailedError, match="ValueError: what the second process says"
    ) as raised:
        notebook_launcher(fail_on_the_second, num_processes=2)
    rank, failure = raised.value.get_first_failure()
    assert rank == 1
    assert f"rank 1 (pid {failure.pid}) failed" in str(failure.message)
    assert capsys.readouterr().out.startswith("Launching training on 2 CPUs.")


@pytest.mark.parametrize(
    "flags", [["--cpu"], ["--cpu", "--gradient_accumulation_steps=2"]]
)
def test_a_launch_starts_one_process_on_the_cpu(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "show.py"
    script.write_text(
        "import os\nprint('started by', os.environ.get('WORLD_SIZE', 'a plain launch'))\n"
    )
    assert launch.run([*flags, "--num_processes=3", str(script)]) == 0
    captured = capfd.readouterr()
    assert captured.out == "started by a plain launch\n"
    assert (
        captured.err
        == "accelerate launch starts 1 process on the CPU; for 3, use torchrun or hasten launch.\n"
    )


def test_uneven_loaders_join_and_windows_clip_at_their_end(
    tmp_path: Path, warm: Any
) -> None:
    done = warm.run(
        tmp_path, [str(Path(__file__).parent / "scripts" / "two_ranks.py")], 2
    )
    assert not done.failed, done.err
    assert done.out == ["fine\n", ""]


def test_a_logger_sets_no_level_but_its_own() -> None:
    root_level = logging.getLogger().level
    assert get_logger("repaired.level", log_level="DEBUG").logger.level == logging.DEBUG
    assert logging.getLogger().level == root_level


def test_env_needs_no_other_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert env.run([]) == 0
    assert "`Accelerate` version: 1.15.0+hasten" in capsys.readouterr().out


def test_two_runs_of_a_project_are_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that is given an id again continues that run and would mix the values of two jobs: wandb chooses ids."""
    from accelerate._impl import trackers

    opened: list[dict[str, object]] = []

    def init(**options: object) -> SimpleNamespace:
        opened.append(options)
        return SimpleNamespace(id=f"chosen-{len(opened)}")

    monkeypatch.setattr(trackers, "need", lambda name: SimpleNamespace(init=init))
    for _ in range(2):
        trackers.WandBTracker("project", entity="us").start()
    # no id, no resume, wandb's own folder
    assert opened == [{"project": "project", "entity": "us"}] * 2


@pytest.mark.filterwarnings("ignore")  # of mlflow, about its store of files
def test_mlflow_takes_the_name_of_the_run_beside_that_of_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experiment is the project, params and one run with its tags are recorded: as the original records them."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tmp_path.as_uri())
    accelerator = Accelerator(cpu=True, log_with="mlflow")
    options = {"mlflow": {"run_name": "first", "tags": {"a": "b"}}}
    accelerator.init_trackers("project", config={"lr": 0.1}, init_kwargs=options)
    accelerator.log({"loss": 0.5}, step=3)
    accelerator.end_training()
    client = mlflow.MlflowClient(tracking_uri=tmp_path.as_uri())
    (run,) = client.search_runs(
        [client.get_experiment_by_name("project").experiment_id]
    )
    assert (run.info.run_name, run.info.status, run.data.params) == (
        "first",
        "FINISHED",
        {"lr": "0.1"},
    )
    assert run.data.tags["a"] == "b"
    assert [
        (metric.step, metric.value)
        for metric in client.get_metric_history(run.info.run_id, "loss")
    ] == [(3, 0.5)]


def test_skipping_counts_steps_where_batches_are_handed_out(
    tmp_path: Path, warm: Any
) -> None:
    script = tmp_path / "skipping.py"
    script.write_text(
        "from torch.utils.data import DataLoader\n"
        "from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches\n"
        "config = DataLoaderConfiguration(dispatch_batches=True)\n"
        "accelerator = Accelerator(cpu=True, dataloader_config=config)\n"
        "loader = accelerator.prepare(DataLoader(list(range(16)), batch_size=2))\n"
        "rows = [accelerator.gather(batch).tolist() for batch in skip_first_batches(loader, 2)]\n"
        "assert rows == [[8, 9, 10, 11], [12, 13, 14, 15]], rows\n"
    )
    done = warm.run(tmp_path, [str(script)], 2)
    assert not done.failed, done.err
