"""Objects of the drop-in as objects: copies, pickles, loaders of torchdata, and helpers that act by hand."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.commands import tpu
from accelerate.commands.config.config_args import (
    SageMakerConfig,
    load_config_from_file,
)
from accelerate.commands.launch import launch_command_parser, sagemaker_launcher
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
    MegatronLMPlugin,
    compute_module_sizes,
)
from accelerate.utils.fsdp_utils import fsdp2_switch_optimizer_parameters
from accelerate.utils.launch import prepare_sagemager_args_inputs
from accelerate.utils.modeling import fallback_allocate, infer_auto_device_map
from hasten.errors import PrepareError

SAGEMAKER = """
compute_environment: AMAZON_SAGEMAKER
distributed_type: DATA_PARALLEL
ec2_instance_type: ml.p3.2xlarge
iam_role_name: role
base_job_name: job
mixed_precision: fp16
sagemaker_metrics_file: {metrics}
"""


@pytest.fixture(autouse=True)
def alone() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def numbers(count: int = 12, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), batch_size=2, **options)


@pytest.mark.parametrize("shuffle", [False, True])
def test_objects_behave_as_objects(shuffle: bool) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(numbers(shuffle=shuffle))
    batches = iter(loader)
    first_batches = [next(batches)[0].tolist() for _ in range(2)]
    state = copy.deepcopy(loader.state_dict())
    remaining = [x.tolist() for (x,) in batches]
    loader.load_state_dict(state)
    assert [x.tolist() for (x,) in loader] == remaining
    assert sorted(row for batch in first_batches + remaining for row in batch) == list(
        range(12)
    )
    skipping = accelerator.skip_first_batches(loader, 1)
    assert isinstance(loader, stateful) and isinstance(skipping, stateful)
    assert skipping.state_dict()["_iterator_finished"]


def test_a_copied_optimizer_follows_windows_and_leaves_its_original_alone() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    copied_optimizer = pickle.loads(pickle.dumps(copy.deepcopy(optimizer)))
    weight, copied_weight = (
        each_optimizer.param_groups[0]["params"][0]
        for each_optimizer in (optimizer, copied_optimizer)
    )
    assert torch.equal(weight, copied_weight) and weight is not copied_weight
    initial_weight = copied_weight.detach().clone()
    copied_weight.grad = torch.ones_like(copied_weight)
    with accelerator.accumulate(model):
        copied_optimizer.step()
        assert torch.equal(copied_weight, initial_weight)  # inside of a window
    with accelerator.accumulate(model):
        copied_optimizer.step()
    assert torch.allclose(copied_weight, initial_weight - 0.1)
    assert torch.equal(weight, initial_weight)


def test_a_copied_accelerator_is_the_same_run() -> None:
    accelerator = Accelerator(cpu=True)
    copied = copy.copy(accelerator)
    assert (
        type(copied) is Accelerator
        and copied is not accelerator
        and copied._clock is accelerator._clock
    )
    assert copy.deepcopy(accelerator) is accelerator


def test_settings_change_before_the_first_model_only() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator._reconfigure(fsdp=accelerator.config.fsdp)
    accelerator.prepare(nn.Linear(2, 1))
    with pytest.raises(PrepareError, match=r"before the first prepare\(\)"):
        accelerator._reconfigure(fsdp=accelerator.config.fsdp)


def test_the_list_that_was_searched_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(3, 3))
    children = list(model.named_children())
    assert fallback_allocate(children, compute_module_sizes(model), 50)[0] == "1"
    assert [name for name, _ in children] == ["0", "1"]


def test_a_tie_to_a_module_that_has_its_device_is_no_error() -> None:
    model = nn.ModuleDict(
        {"first": nn.ModuleDict({"second": nn.Linear(2, 2)}), "second": nn.Linear(2, 2)}
    )
    model["third"] = nn.Linear(2, 2)
    model["third"].weight = model["first"]["second"].weight  # type: ignore[index]  # a dict of modules
    assert infer_auto_device_map(model, {"cpu": 100}) == {"": "cpu"}


def test_an_optimizer_is_switched_to_other_parameters() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([first], lr=0.1)
    with pytest.raises(KeyError, match="no entry in `mapping`"):
        fsdp2_switch_optimizer_parameters(optimizer, {})
    fsdp2_switch_optimizer_parameters(optimizer, {first.data_ptr(): second})
    assert optimizer.param_groups[0]["params"][0] is second


def test_settings_of_sagemaker_are_data(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.tsv"
    metrics.write_text("metric_name\tregex\nacc\tacc=(.*)\n")
    file = tmp_path / "sagemaker.yaml"
    file.write_text(SAGEMAKER.format(metrics=metrics))
    config = load_config_from_file(str(file))
    assert isinstance(config, SageMakerConfig)
    args = launch_command_parser().parse_args(
        ["train.py", "--lr", "0.1", "--deep", "True", "--as_text", "true"]
    )
    estimator, channels = prepare_sagemager_args_inputs(config, args)
    assert (
        estimator["hyperparameters"] == {"lr": 0.1, "deep": True, "as_text": "true"}
        and channels is None
    )
    assert estimator["metric_definitions"] == [{"Name": "acc", "Regex": "acc=(.*)"}]
    assert estimator["distribution"] == {
        "smdistributed": {"dataparallel": {"enabled": True}}
    }
    with pytest.raises(ImportError, match="Amazon's SDK"):
        sagemaker_launcher(config, args)
    with pytest.raises(ValueError, match="define explicit types"):
        prepare_sagemager_args_inputs(
            config, launch_command_parser().parse_args(["train.py", "--flag"])
        )


def test_a_tpu_is_named_and_commands_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "commands"
    file.write_text("echo 1\necho 2\n")
    assert tpu.run(["--tpu_name", "t", "--command_file", str(file), "--debug"]) == 0
    assert "cd /usr/share; echo 1; echo 2 --worker all" in capsys.readouterr().out
    assert tpu.run(["--command", "echo"]) == 2
    assert "Give --tpu_name" in capsys.readouterr().err


def test_options_of_megatron_become_hastens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_PP_DEGREE", "4")
    plugin = MegatronLMPlugin(tp_degree=2, gradient_clipping=1.0).to_hasten()
    assert (plugin.tp_degree, plugin.pp_degree, plugin.gradient_clipping) == (2, 4, 1.0)
