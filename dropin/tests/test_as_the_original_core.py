"""Behaviours of the Accelerator, its optimizers, checkpoints and trackers that were seen in the original by running it, and hold here."""

from __future__ import annotations

import json
import logging
import platform
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, Mock, call, patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import (
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.logging import MultiProcessAdapter, get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.test_utils import testing
from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    MLflowTracker,
    WandBTracker,
    filter_trackers,
    register_tracker_class,
)
from accelerate.utils import DistributedType, RNGType, patch_environment, set_seed
from accelerate.utils.fsdp_utils import (
    fsdp2_apply_ac,
    fsdp2_prepare_auto_wrap_policy,
    fsdp2_switch_optimizer_parameters,
)
from accelerate.utils.random import synchronize_rng_states

pytestmark = pytest.mark.usefixtures("fresh_states")


class Counter:
    """An object that can be registered."""

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        return None


def test_arguments_are_taken_as_they_are() -> None:
    with pytest.raises(ValueError, match="Unknown mixed_precision mode: BF16"):
        Accelerator(cpu=True, mixed_precision="BF16")
    assert Accelerator(cpu=True, rng_types=[RNGType.TORCH]).rng_types == [RNGType.TORCH]


@pytest.mark.parametrize(
    ("variable", "steps", "expected_steps"), [("1", 2, 1), ("4", 2, 4), (None, 2, 2)]
)
def test_the_variable_decides_about_accumulation(
    variable: str | None, steps: int, expected_steps: int
) -> None:
    with patch_environment(
        **(
            {}
            if variable is None
            else {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": variable}
        )
    ):
        assert (
            Accelerator(
                cpu=True, gradient_accumulation_steps=steps
            ).gradient_accumulation_steps
            == expected_steps
        )


def test_an_accelerator_is_as_new_after_its_memory_was_freed() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1))
    with accelerator.accumulate(model):
        pass
    assert accelerator.step == 1
    accelerator.free_memory()
    assert accelerator.step == 0


@pytest.mark.parametrize("placed", [True, False])
def test_optimizers_show_whether_they_are_placed(placed: bool) -> None:
    accelerator = Accelerator(cpu=True)
    optimizers = [
        torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1) for _ in range(2)
    ]
    first_prepared = accelerator.prepare_optimizer(
        optimizers[0], device_placement=placed
    )
    second_prepared = accelerator.prepare(optimizers[1], device_placement=[placed])
    assert (first_prepared.device_placement, second_prepared.device_placement) == (
        placed,
        placed,
    )


def test_schedulers_follow_optimizers_that_are_prepared_later() -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = accelerator.prepare(LambdaLR(optimizer, lambda epoch: 1.0))
    assert scheduler.optimizers == []
    assert scheduler.optimizers is accelerator._optimizers
    accelerator.prepare(optimizer)
    assert len(scheduler.optimizers) == 1
    assert AcceleratedScheduler(scheduler.scheduler, (optimizer,)).optimizers == (
        optimizer,
    )


def test_optimizers_need_an_accelerator() -> None:
    with pytest.raises(ValueError, match="properly initialize your accelerator"):
        AcceleratedOptimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))


@pytest.mark.parametrize("gradient", [1.0, float("inf")])
def test_a_scaler_that_is_given_decides_about_the_update(gradient: float) -> None:
    Accelerator(cpu=True)
    model, scaler = nn.Linear(1, 1), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = AcceleratedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), scaler=scaler
    )
    initial_weight = model.weight.item()
    scaler.scale(model(torch.ones(1, 1)).sum()).backward()
    assert model.weight.grad is not None
    model.weight.grad.mul_(gradient)
    optimizer.step()
    skipped = gradient != 1.0
    assert optimizer.step_was_skipped == skipped
    assert model.weight.item() == pytest.approx(
        initial_weight - (not skipped), abs=1e-6
    )
    assert scaler.get_scale() == (2.0 if skipped else 4.0)


def test_an_optimizer_without_set_to_none_is_cleared_and_refuses_it() -> None:
    class Older(torch.optim.SGD):
        def zero_grad(self) -> None:  # type: ignore[override]  # as classes of users are written
            super().zero_grad()

    optimizer = Accelerator(cpu=True).prepare(
        Older(nn.Linear(1, 1).parameters(), lr=0.1)
    )
    optimizer.zero_grad()
    with pytest.raises(
        ValueError, match=r"`set_to_none` for .* is not supported by this"
    ):
        optimizer.zero_grad(set_to_none=True)


def test_a_model_over_several_devices_is_trained_by_one_process_only() -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    model.hf_device_map = {"a": "cpu", "b": "disk"}  # type: ignore[assignment]
    assert accelerator.prepare(model) is model
    accelerator.state.distributed_type = DistributedType.MULTI_CPU
    with pytest.raises(
        ValueError, match="loaded with `device_map='auto'` in any distributed mode"
    ):
        accelerator.prepare(model)


def test_one_process_has_nothing_to_leave_unsynchronised() -> None:
    model = Mock()
    with Accelerator(cpu=True).no_sync(model):
        model.no_sync.assert_not_called()


def test_reduced_tensors_are_copies() -> None:
    tensor = torch.ones(2)
    reduced = Accelerator(cpu=True).reduce([tensor])
    assert torch.equal(reduced[0], tensor)
    assert reduced[0].data_ptr() != tensor.data_ptr()


def test_cores_and_kernel_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        platform, "uname", lambda: SimpleNamespace(system="Linux", release="5.4.0")
    )
    with patch("accelerate.state.set_numa_affinity") as bind:
        with patch_environment(ACCELERATE_CPU_AFFINITY="1"):
            PartialState(cpu=True)
        bind.assert_called_once_with(0)
    Accelerator(cpu=True)
    assert "Detected kernel version 5.4.0" in caplog.text


@pytest.mark.parametrize("main", [True, False])
def test_every_view_follows_the_states(main: bool) -> None:
    accelerator = Accelerator(cpu=True)
    with patch("accelerate.state.PartialState.is_main_process", main):
        assert (accelerator.is_main_process, accelerator.state.is_main_process) == (
            main,
            main,
        )
    PartialState().num_processes = 3
    assert not PartialState().use_distributed and not accelerator.is_last_process
    accelerator.state.distributed_type = DistributedType.MULTI_GPU
    assert AcceleratorState().distributed_type == DistributedType.NO
    assert (accelerator.num_processes, accelerator.is_last_process) == (3, False)


def test_lists_of_an_accelerator_and_its_scaler_can_be_replaced() -> None:
    accelerator = Accelerator(cpu=True)
    for name in (
        "_models",
        "_optimizers",
        "_schedulers",
        "_dataloaders",
        "_custom_objects",
    ):
        setattr(accelerator, name, ["other"])
        assert getattr(accelerator, name) == ["other"]
    accelerator.scaler = "a scaler"
    assert accelerator.scaler == "a scaler"
    with pytest.raises(AttributeError, match="no setter"):
        accelerator.split_batches = True


def test_a_loss_of_another_class_is_divided_and_told() -> None:
    loss = MagicMock()
    Accelerator(cpu=True, gradient_accumulation_steps=4).backward(
        loss, retain_graph=True
    )
    assert loss.mock_calls == [
        call.__truediv__(4),
        call.__truediv__().backward(retain_graph=True),
    ]


def test_tensors_among_other_objects_are_gathered_as_objects() -> None:
    accelerator = Accelerator(cpu=True)
    for batch in accelerator.prepare(DataLoader(range(5), batch_size=2)):  # type: ignore[arg-type]
        gathered = accelerator.gather_for_metrics([batch, "x"])
        words = accelerator.gather_for_metrics("abcd")
    assert (len(gathered), words) == (1, "a")


def test_schedulers_step_as_often_as_the_state_says() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda epoch: 1.0)
    with pytest.raises(ValueError, match="properly initialize your accelerator"):
        AcceleratedScheduler(scheduler, []).step()
    Accelerator(cpu=True)
    PartialState().num_processes = 3
    AcceleratedScheduler(scheduler, []).step()
    assert scheduler.last_epoch == 3


def test_schedules_of_other_classes_are_left_as_they_are_unless_asked_for() -> None:
    class Schedule:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)

        def step(self) -> None:
            return None

    accelerator, schedule = Accelerator(cpu=True), Schedule()
    assert accelerator.prepare(schedule) is schedule and accelerator._schedulers == []
    assert isinstance(accelerator.prepare_scheduler(schedule), AcceleratedScheduler)


@pytest.mark.parametrize("order", [1, 2, float("inf")])
def test_gradients_are_clipped_by_the_step_of_clipping(order: float) -> None:
    plain, reference = nn.Linear(2, 2), nn.Linear(2, 2)
    for layer in (plain, reference):
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, 3.0)
    norm = Accelerator(cpu=True)._clip_grad_norm_dtensor_aware(
        plain.parameters(), 1.0, order
    )
    assert torch.allclose(
        norm, nn.utils.clip_grad_norm_(reference.parameters(), 1.0, order)
    )
    assert plain.weight.grad is not None and reference.weight.grad is not None
    assert torch.allclose(plain.weight.grad, reference.weight.grad)


def test_the_window_follows_a_count_that_is_set() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, flags = accelerator.prepare(nn.Linear(1, 1)), []
    accelerator.step = 1
    for _ in range(3):
        with accelerator.accumulate(model):
            flags.append((accelerator.step, accelerator.sync_gradients))
    accelerator._do_sync()
    assert flags == [(2, False), (3, True), (4, False)]
    assert (accelerator.step, accelerator.sync_gradients) == (5, False)


def test_names_of_the_module_are_called() -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with patch("accelerate.accelerator.AcceleratedOptimizer") as wrapper_class:
        assert accelerator.prepare_optimizer(optimizer) is wrapper_class.return_value
    with patch("accelerate.accelerator.AcceleratedScheduler") as wrapper_class:
        assert (
            accelerator.prepare_scheduler(LambdaLR(optimizer, lambda epoch: 1.0))
            is wrapper_class.return_value
        )
    with patch("torch.nn.utils.clip_grad_norm_", return_value=5) as clips:
        assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == 5
    assert (clips.call_args.args[1:], clips.call_args.kwargs) == (
        (1.0,),
        {"norm_type": 2},
    )
    with patch(
        "accelerate.accelerator.filter_trackers", return_value=["one"]
    ) as filter_call:
        assert Accelerator(cpu=True, log_with="all").log_with == ["one"]
    filter_call.assert_called_once_with("all", None)
    with patch("accelerate.state.PartialState.wait_for_everyone") as waits:
        accelerator.wait_for_everyone()
    waits.assert_called_once_with()


def test_attributes_are_settable_as_before() -> None:
    accelerator = Accelerator(cpu=True)
    for name in ("native_amp", "fp8_enabled", "has_fp8_handler"):
        assert getattr(accelerator, name) is False
        setattr(accelerator, name, True)
        assert getattr(accelerator, name) is True
    with pytest.raises(
        AttributeError,
        match="property 'num_processes' of 'Accelerator' object has no setter",
    ):
        accelerator.num_processes = 2
    accelerator.gradient_state.is_xla_gradients_synced = True
    assert GradientState().is_xla_gradients_synced


def test_helpers_follow_the_place_that_a_state_shows() -> None:
    state = PartialState(cpu=True)
    state.num_processes, state.process_index, state.local_process_index = 2, 1, 1
    state.distributed_type = DistributedType.MULTI_CPU
    with state.split_between_processes([0, 1, 2]) as share:
        assert share == [2]
    with (
        pytest.raises(ValueError, match="must have the same length"),
        state.split_between_processes({"a": [1], "b": ""}),
    ):
        pass
    helpers = (
        state.on_main_process,
        state.on_local_main_process,
        state.on_last_process,
    )
    assert [decorator(lambda: 1)() for decorator in helpers] == [None, None, 1]


def test_seeds_and_generators_are_those_of_the_state() -> None:
    with pytest.raises(ValueError, match="properly initialize your accelerator"):
        set_seed(1, device_specific=True)
    set_seed(4)
    expected = torch.rand(1)
    with patch("accelerate.utils.random.AcceleratorState") as state:
        state.return_value.process_index = 3
        assert set_seed(1, device_specific=True) is None
    assert torch.equal(torch.rand(1), expected)
    with patch("accelerate.utils.random.synchronize_rng_state") as synchronize:
        synchronize_rng_states(["torch", "cuda"])
    assert synchronize.call_args_list == [
        call(RNGType(kind), generator=None) for kind in ("torch", "cuda")
    ]
    with pytest.raises(AssertionError, match="torch_xla is unavailable"):
        synchronize_rng_states(["xla"])


def test_tests_that_need_a_package_ask_where_it_is_replaced() -> None:
    for is_available in (True, False):
        with patch(
            "accelerate.test_utils.testing.is_wandb_available",
            return_value=is_available,
        ):
            assert (
                getattr(
                    vars(testing)["require_wandb"](lambda: None),
                    "__unittest_skip__",
                    False,
                )
                is not is_available
            )


# -- checkpoints ------------------------------------------------------------------------------------------------------
def test_saving_and_loading_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "accelerate.accelerator")
    accelerator = Accelerator(cpu=True)
    accelerator.save_state(str(tmp_path))
    accelerator.load_state(str(tmp_path))
    messages = [
        record.getMessage()
        for record in caplog.records
        if record.name == "accelerate.accelerator"
    ]
    assert messages == [
        f"[RANK 0] Saving current state to {tmp_path}",
        f"[RANK 0] Loading states from {tmp_path}",
    ]


def test_a_checkpoint_of_other_objects_or_another_model_is_a_runtime_error(
    tmp_path: Path,
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.register_for_checkpointing(Counter())
    accelerator.save_state(str(tmp_path))
    accelerator._custom_objects.clear()
    with pytest.raises(
        RuntimeError, match=r"Found checkpoints: 1\s+Registered objects: 0"
    ):
        accelerator.load_state(str(tmp_path))
    accelerator.register_for_checkpointing(Counter())
    accelerator.free_memory()
    accelerator.prepare(nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="shape"):
        accelerator.load_state(str(tmp_path))


def test_places_of_optimizers_are_checked(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.save_state(str(tmp_path))
    accelerator.load_state(str(tmp_path), map_location="on_device")
    with pytest.raises(TypeError, match="Unsupported optimizer map location"):
        accelerator.load_state(str(tmp_path), map_location="elsewhere")


def test_files_that_were_copied_without_the_hidden_ones_are_loaded(
    tmp_path: Path,
) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(str(tmp_path / "saved"))
    weight = model.weight.detach().clone()
    (tmp_path / "copied").mkdir()
    for file in (tmp_path / "saved").glob("[!.]*"):
        shutil.copy(file, tmp_path / "copied")
    nn.init.zeros_(model.weight)
    accelerator.load_state(str(tmp_path / "copied"))
    assert torch.equal(model.weight, weight)


def test_a_folder_below_home_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state("~/saved")
    weight = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    accelerator.load_state("~/saved")
    assert torch.equal(model.weight, weight)


def test_shards_are_filled_as_the_hubs_tools_fill_them(tmp_path: Path) -> None:
    model = nn.ModuleDict(
        {"a": nn.Linear(30, 40), "b": nn.BatchNorm1d(40), "c": nn.Linear(40, 50)}
    )
    Accelerator(cpu=True).save_model(model, tmp_path, max_shard_size="5KB")
    table = json.loads((tmp_path / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    shards = {name: int(file[6:11]) for name, file in table.items()}
    assert shards["a.weight"] == shards["a.bias"] == 1
    assert shards["c.weight"] == 2
    assert {number for name, number in shards.items() if name[0] == "b"} | {
        shards["c.bias"]
    } == {3}


# -- trackers ---------------------------------------------------------------------------------------------------------
class Own(GeneralTracker):
    """A tracker of one's own for every process."""

    name, requires_logging_directory, main_process_only, tracker = (
        "own",
        False,
        False,
        None,
    )


def test_trackers_run_on_the_main_process() -> None:
    accelerator = Accelerator(cpu=True, log_with=Own())
    accelerator.init_trackers("run")
    assert [tracker.name for tracker in accelerator.trackers] == ["own"]
    accelerator.trackers = []
    with patch("accelerate.tracking.PartialState.is_main_process", False):
        accelerator.init_trackers("run")
    assert accelerator.trackers == []


def test_settings_of_mlflow_are_taken_by_place() -> None:
    PartialState(cpu=True)
    tracker = MLflowTracker("name", "folder", "id", {"a": "b"}, True, "run", "text")
    assert (tracker.run_id, tracker.tags, tracker.nested_run) == (
        "id",
        {"a": "b"},
        True,
    )
    assert (tracker.logging_dir, tracker.run_name, tracker.description) == (
        "folder",
        "run",
        "text",
    )
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        MLflowTracker("name", other=1)  # type: ignore[call-arg]


def test_mlflow_is_told_by_names(monkeypatch: pytest.MonkeyPatch) -> None:
    log_call = Mock()
    package = SimpleNamespace(
        log_figure=log_call, log_artifact=log_call, log_artifacts=log_call
    )
    monkeypatch.setattr(MLflowTracker, "_module", package)
    PartialState(cpu=True)
    tracker: Any = MLflowTracker("run")
    tracker.log_figure(1, "a.png", dpi=3)
    tracker.log_artifact("b")
    tracker.log_artifacts("c", artifact_path="d")
    assert [call.kwargs for call in log_call.call_args_list] == [
        {"figure": 1, "artifact_file": "a.png", "dpi": 3},
        {"local_path": "b", "artifact_path": None},
        {"local_dir": "c", "artifact_path": "d"},
    ]


class WithFolder(Own):
    """A tracker of one's own for which a folder is kept, as it is registered by its class."""

    name, requires_logging_directory, tracker = "with_folder", True, None

    def __init__(self, run_name: str, folder: str, **kwargs: Any) -> None:
        super().__init__()
        self.given = (run_name, folder, kwargs)


def test_registered_trackers_get_their_folder_by_place(tmp_path: Path) -> None:
    with patch.dict(LOGGER_TYPE_TO_CLASS):
        register_tracker_class(WithFolder)
        accelerator = Accelerator(
            cpu=True, log_with="with_folder", project_dir=str(tmp_path)
        )
        accelerator.init_trackers("one", init_kwargs={"with_folder": {"a": 1}})
        accelerator.init_trackers("two")
    assert [tracker.given for tracker in accelerator.trackers] == [
        ("one", str(tmp_path), {"a": 1}),
        ("two", str(tmp_path), {}),
    ]
    with pytest.raises(
        ValueError, match="must be a subclass of `GeneralTracker`, but got 3"
    ):
        register_tracker_class(3)


def test_modules_that_stand_for_packages_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", package)
    PartialState(cpu=True)
    tracker = WandBTracker("run", group="a")
    tracker.start()
    tracker.log({"loss": 1.0}, step=2)
    assert package.mock_calls == [
        call.init(project="run", group="a"),
        call.init().log({"loss": 1.0}, step=2),
    ]


def test_packages_that_are_missing_are_told_at_the_level_of_debugging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    PartialState(cpu=True)
    caplog.set_level(logging.DEBUG, "accelerate.tracking")
    with patch(
        "accelerate._impl.trackers.registry.installed_trackers", return_value=[]
    ):
        assert filter_trackers("wandb") == []
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "DEBUG",
            "[RANK 0] Tried adding logger wandb, but package is unavailable in the system.",
        )
    ]


# -- loggers ----------------------------------------------------------------------------------------------------------
def test_loggers_ask_the_state_for_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    PartialState(cpu=True)
    logger = get_logger("of_a_user", log_level="INFO")
    with patch("accelerate.logging.PartialState") as state:
        state.return_value = SimpleNamespace(is_main_process=False, process_index=1)
        logger.info("hidden")
        logger.info("seen", main_process_only=False)
    with patch("accelerate.state.PartialState.wait_for_everyone") as waits:
        PartialState().num_processes = 2
        logger.info("in turn", main_process_only=False, in_order=True)
    assert [record.getMessage() for record in caplog.records] == [
        "[RANK 1] seen",
        "[RANK 0] in turn",
    ]
    assert waits.call_count == 2


def test_what_an_adapter_adds_is_in_its_records() -> None:
    PartialState(cpu=True)
    adapter = MultiProcessAdapter(logging.getLogger("of_a_user"), {"run": 1})
    assert adapter.process("m", {}) == (
        "[RANK 0] m",
        {"extra": {"run": 1}, "stacklevel": 2},
    )


def test_a_warning_that_was_given_once_can_be_given_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    PartialState(cpu=True)
    logger = get_logger("of_a_user")
    for _ in range(2):
        logger.warning_once("a")
        logger.warning_once("a")
        logger.warning_once.cache_clear()
    assert [(record.getMessage(), record.filename) for record in caplog.records] == [
        ("[RANK 0] a", Path(__file__).name)
    ] * 2


# -- shards by hand ---------------------------------------------------------------------------------------------------
class Blocks(nn.Module):
    """Two blocks that are to be sharded, and a layer beside them."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.beside = (
            nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]),
            nn.LayerNorm(3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return cast("torch.Tensor", self.beside(x))


@pytest.mark.parametrize(
    ("policy", "names", "size", "expected_names"),
    [
        (transformer_auto_wrap_policy, ["LayerNorm"], None, ["beside"]),
        (transformer_auto_wrap_policy, None, None, ["blocks.0", "blocks.1"]),
        (size_based_auto_wrap_policy, None, 12, ["", "blocks"]),
        (None, None, None, None),
    ],
)
def test_a_policy_of_any_object_tells_the_modules(
    policy: Any, names: Any, size: Any, expected_names: Any
) -> None:
    model = Blocks()
    plugin = SimpleNamespace(
        auto_wrap_policy=policy,
        transformer_cls_names_to_wrap=names,
        min_num_params=size,
    )
    is_wrapped = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert (
        is_wrapped
        and [name for name, module in model.named_modules() if is_wrapped(module)]
    ) == expected_names


@pytest.mark.parametrize("offload", [False, True])
def test_chosen_blocks_themselves_are_recomputed(offload: bool) -> None:
    plugin = MagicMock(
        transformer_cls_names_to_wrap=None, activation_checkpointing_offload=offload
    )
    plugin.auto_wrap_policy = transformer_auto_wrap_policy
    model, x = Blocks(), torch.ones(2, 3)
    expected = model(x)
    recomputed = fsdp2_apply_ac(
        SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)), model
    )
    assert [
        type(block).__name__ for block in recomputed.get_submodule("blocks").children()
    ] == ["OffloadWrapper" if offload else "CheckpointWrapper"] * 2
    assert torch.equal(recomputed(x), expected)
    recomputed(x).sum().backward()


def test_an_optimizer_is_switched_by_its_parameters_methods() -> None:
    old, new = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(old.parameters(), lr=1.0)
    pairs = zip(old.parameters(), new.parameters(), strict=True)
    fsdp2_switch_optimizer_parameters(
        optimizer,
        {
            old_parameter.data_ptr: new_parameter
            for old_parameter, new_parameter in pairs
        },
    )
    assert optimizer.param_groups[0]["params"][0] is new.weight
