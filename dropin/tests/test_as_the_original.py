"""Behaviours that were seen in the original by running it, and hold here: messages, records and attributes."""

from __future__ import annotations

import argparse
import logging
import pickle
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from accelerate import (
    Accelerator,
    ParallelismConfig,
    cpu_offload_with_hook,
    init_empty_weights,
)
from accelerate._impl.commands.launch_flags import _validate_launch_command
from accelerate._impl.settings import kwargs_handlers
from accelerate.commands.config.config_args import (
    SageMakerConfig,
    load_config_from_file,
)
from accelerate.commands.env import env_command, env_command_parser
from accelerate.commands.estimate import create_ascii_table, estimate_training_usage
from accelerate.commands.launch import launch_command_parser
from accelerate.data_loader import prepare_data_loader
from accelerate.hooks import (
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    remove_hook_from_module,
)
from accelerate.logging import MultiProcessAdapter
from accelerate.state import AcceleratorState, PartialState
from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    register_tracker_class,
)
from accelerate.utils import (
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TERecipeKwargs,
    TorchDynamoPlugin,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
    compile_regions,
    convert_dict_to_env_variables,
    convert_outputs_to_fp32,
    extract_model_from_parallel,
    has_compiled_regions,
    infer_auto_device_map,
    is_transformer_engine_available,
    load_checkpoint_in_model,
    save,
    set_module_tensor_to_device,
)
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

pytestmark = pytest.mark.usefixtures("fresh_states")
NAMED = (
    "device",
    "num_processes",
    "backend",
    "distributed_type",
    "deepspeed_plugin",
    "_mixed_precision",
)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight


@pytest.mark.parametrize("name", NAMED)
def test_attributes_of_a_reset_state_name_the_reset(name: str) -> None:
    state = Accelerator(cpu=True).state
    AcceleratorState._reset_state()
    with pytest.raises(
        AttributeError, match=f"`{name}`.*`AcceleratorState._reset_state"
    ):
        getattr(state, name)
    partial: Any = PartialState()
    PartialState._reset_state()
    if name != "deepspeed_plugin":
        with pytest.raises(
            AttributeError, match=f"`{name}`.*`PartialState._reset_state"
        ):
            getattr(partial, name)


def test_one_process_joins_whatever_it_is_given(
    recwarn: pytest.WarningsRecorder,
) -> None:
    with Accelerator(cpu=True).join_uneven_inputs([Mock()]):
        pass
    assert not recwarn.list


def test_a_logger_around_an_adapter_names_the_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Mine(logging.LoggerAdapter[Any]):
        def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
            return f"[mine] {msg}", kwargs

    Accelerator(cpu=True)
    plain = logging.getLogger("of_a_user")
    MultiProcessAdapter(Mine(plain, {})).error("one")
    Mine(MultiProcessAdapter(plain), {}).error("two")
    assert [record.getMessage() for record in caplog.records] == [
        "[mine] [RANK 0] one",
        "[RANK 0] [mine] two",
    ]
    assert {record.filename for record in caplog.records} == {Path(__file__).name}


def test_variables_that_cannot_be_written_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = convert_dict_to_env_variables(
        {"A": "1", "B": "two words", "C": "x\ny", "D": "", "E": "a|b"}
    )
    assert lines == ["A=1\n", "E=a|b\n"]
    assert [record.getMessage().split()[2][0] for record in caplog.records] == [
        "B",
        "C",
        "D",
    ]


def test_options_of_a_compilation_that_variables_set_are_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "true")
    assert TorchDynamoPlugin().to_kwargs() == {
        "backend": "inductor",
        "mode": "reduce-overhead",
        "fullgraph": True,
    }
    assert (
        TorchDynamoPlugin(backend="eager", dynamic=False).to_kwargs()["dynamic"]
        is False
    )


@pytest.mark.parametrize("saving", ["save", "model", "state"])
def test_names_that_share_memory_are_named_once(
    saving: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Tied()
    if saving == "save":  # without an Accelerator
        save(
            model.state_dict(), tmp_path / "model.safetensors", safe_serialization=True
        )
    else:
        accelerator = Accelerator(cpu=True)
        accelerator.save_model(
            model, tmp_path
        ) if saving == "model" else accelerator.prepare(model)
        if saving == "state":
            accelerator.save_state(str(tmp_path))
    removal_messages = [
        record.getMessage()
        for record in caplog.records
        if "Removed shared tensor" in record.getMessage()
    ]
    assert len(removal_messages) == 1 and "{'b.weight'}" in removal_messages[0]


def test_models_that_cannot_be_saved_are_told_as_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator(cpu=True)
    with init_empty_weights():
        empty = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="some parameters are on the meta device"):
        accelerator.save_model(empty, tmp_path / "a")
    (tmp_path / "file").touch()
    accelerator.save_model(nn.Linear(2, 2), tmp_path / "file")
    assert "should be a directory, not a file" in caplog.text


def test_a_model_whose_weights_are_away_is_saved_whole(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attach_align_device_hook(model, execution_device=torch.device("cpu"), offload=True)
    Accelerator(cpu=True).save_model(model, tmp_path)
    loaded_model = nn.Sequential(nn.Linear(2, 2))
    load_checkpoint_in_model(loaded_model, tmp_path)
    assert all(
        torch.equal(tensor, expected[name])
        for name, tensor in loaded_model.state_dict().items()
    )


def test_removing_the_handle_of_an_offloaded_model_removes_what_is_shown() -> None:
    model, handle = cpu_offload_with_hook(nn.Linear(2, 2), torch.device("cpu"))
    assert hasattr(model, "_hf_hook")
    handle.remove()
    assert not hasattr(model, "_hf_hook") and not hasattr(model, "_old_forward")


def test_a_prepared_loader_gives_and_takes_its_sampler() -> None:
    loader = Accelerator(cpu=True).prepare(
        DataLoader(range(4), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    )
    assert type(loader.get_sampler()).__name__ == "RandomSampler"
    loader.set_sampler(SequentialSampler(range(4)))
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_batches_given_as_a_sampler_are_drawn_alike_by_every_process() -> None:
    drawn: Any = RandomSampler(range(8))
    plain: Any = DataLoader(
        range(8),  # type: ignore[arg-type]
        sampler=BatchSampler(drawn, 2, False),
        batch_size=None,
    )
    Accelerator(cpu=True)
    loader = prepare_data_loader(
        plain, num_processes=2, process_index=0, rng_types=["generator"]
    )
    assert (
        drawn.generator is not None and loader.synchronized_generator is drawn.generator
    )


def test_a_backward_for_lomo_needs_its_optimizer() -> None:
    with pytest.raises(ValueError, match="passed a LOMO optimizer"):
        Accelerator(cpu=True).lomo_backward(
            torch.ones(1, requires_grad=True).sum(), 0.1
        )


def test_sizes_of_a_mesh_by_axis_and_its_backends() -> None:
    assert ParallelismConfig(tp_size=2)._sizes["tp"] == 2
    with pytest.raises(
        ValueError, match=r"cp_backend must be one of \['torch'\], but got other"
    ):
        ParallelismConfig(cp_backend="other")


def test_sizes_are_checked_against_an_accelerator() -> None:
    accelerator = Mock(
        num_processes=4, is_fsdp2=True, multi_device=False, distributed_type="FSDP"
    )
    for sizes, message in (
        ({"dp_shard_size": 2}, "does not match num_processes"),
        ({"tp_size": 4}, "no dimension for"),
    ):
        with pytest.raises(ValueError, match=message):
            ParallelismConfig(**sizes)._validate_accelerator(accelerator)
    ParallelismConfig(dp_shard_size=4)._validate_accelerator(accelerator)
    accelerator.is_fsdp2, accelerator.distributed_type = False, "NO"
    with pytest.raises(
        ValueError, match=r"is only compatible DistributedType\.FSDP .* but got NO\."
    ):
        ParallelismConfig(dp_shard_size=4)._validate_accelerator(accelerator)


def test_recipes_are_filled_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_transformer_engine_available():
        with pytest.raises(ImportError, match="TransformerEngine is not available"):
            TERecipeKwargs()
        with (
            pytest.warns(FutureWarning),
            pytest.raises(ImportError, match="TransformerEngine is not available"),
        ):
            FP8RecipeKwargs(backend="TE")
    monkeypatch.setattr(
        kwargs_handlers, "is_transformer_engine_available", lambda: True
    )
    assert (
        TERecipeKwargs().fp8_format == "HYBRID"
        and TERecipeKwargs().override_linear_precision == (False,) * 3
    )
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "3")
    monkeypatch.setenv("ACCELERATE_FP8_FORMAT", "E4M3")
    recipe = TERecipeKwargs()
    assert (recipe.margin, recipe.fp8_format, recipe.to_hasten().margin) == (
        3,
        "E4M3",
        3,
    )
    wrong: dict[str, Any] = {
        "fp8_format": TERecipeKwargs,
        "amax_compute_algo": TERecipeKwargs,
        "opt_level": MSAMPRecipeKwargs,
    }
    for name, kind in wrong.items():
        with pytest.raises(ValueError, match=f"`{name}` must be one of"):
            kind(**{name: "other"})
    with (
        pytest.warns(FutureWarning),
        pytest.raises(ValueError, match="`backend` must be 'MSAMP' or 'TE'"),
    ):
        FP8RecipeKwargs(backend="other")
    with pytest.warns(UserWarning, match="Async tensor parallelism"):
        TorchTensorParallelConfig(enable_async_tp=True)


def test_a_deepspeed_plugin_is_selected_by_the_state_and_names_what_is_missing() -> (
    None
):
    plugin = DeepSpeedPlugin(transformer_moe_cls_names="Linear,Expert")
    with pytest.raises(NotImplementedError, match="can only be set through calling"):
        plugin.selected = True
    with pytest.raises(Exception, match="a transformer layer class called 'Expert'"):
        plugin.set_moe_leaf_modules(nn.Sequential(nn.Linear(1, 1)))
    with pytest.raises(ValueError, match="DeepSpeed is not enabled"):
        Accelerator(cpu=True).state.get_deepspeed_plugin("any")
    with pytest.warns(UserWarning, match="only applicable for ZeRO Stage 3"):
        assert not DeepSpeedPlugin(zero3_init_flag=True).zero3_init_flag


@pytest.mark.parametrize(
    ("word", "dynamo_config"),
    [("INDUCTOR", {"dynamo_backend": "INDUCTOR"}), ("NO", {})],
)
def test_a_backend_of_older_settings_files_is_moved(
    tmp_path: Path, word: str, dynamo_config: dict[str, str]
) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(yaml.safe_dump({"distributed_type": "NO", "dynamo_backend": word}))
    assert vars(load_config_from_file(str(file)))["dynamo_config"] == dynamo_config


def test_settings_of_older_files_and_of_the_cloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nfp16: true\nuse_cpu: true\n"
    )
    config = load_config_from_file(str(file))
    assert config.mixed_precision == "fp16" and list(config.to_dict())[:2] == [
        "compute_environment",
        "distributed_type",
    ]
    env_command(env_command_parser().parse_args(["--config_file", str(file)]))
    assert (
        "- `Accelerate` config passed:\n\t- compute_environment: LOCAL_MACHINE\n"
        in capsys.readouterr().out
    )
    cloud = SageMakerConfig(
        "AMAZON_SAGEMAKER", "NO", "no", False, False, "ml.p3.2xlarge", "role"
    )
    assert (cloud.base_job_name, cloud.py_version) == ("accelerate-sagemaker-1", "py38")


def test_a_validated_command_line_without_devices_is_prepared() -> None:
    args = _validate_launch_command(_parsed("--cpu"))[0]
    assert prepare_simple_launcher_cmd_env(args)[0][-1] == "train.py"


def _parsed(*words: str) -> argparse.Namespace:
    return launch_command_parser().parse_args([*words, "train.py"])


def test_command_lines_that_mean_nothing_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="at least 2 processes"):
        _validate_launch_command(_parsed("--multi_gpu", "--num_processes", "1"))
    for words in (
        ("--mixed_precision", "fp32"),
        ("--dynamo_mode", "quick"),
        ("--fsdp_version", "3"),
    ):
        with suppress(SystemExit):
            pytest.fail(f"{words} were taken: {_parsed(*words)}")
        assert "invalid choice" in capsys.readouterr().err


def test_the_table_of_an_estimate() -> None:
    rows = [
        ["float32", "84.95 MB", "413.18 MB", "1.61 GB"],
        ["int4", "10.62 MB", "51.65 MB", "N/A"],
    ]
    headers = ["dtype", "Largest Layer", "Total Size", "Training using Adam"]
    lines = create_ascii_table(
        headers, rows, "Memory Usage for loading `bert-base-cased`"
    ).splitlines()
    assert lines[1] == "│     Memory Usage for loading `bert-base-cased`     │"
    assert lines[5:7] == [
        "│float32│   84.95 MB  │413.18 MB │      1.61 GB      │",
        "│  int4 │   10.62 MB  │ 51.65 MB │        N/A        │",
    ]
    widened = create_ascii_table(
        ["a", "b"], [["1", "2"]], "A title that is long enough to be wide"
    ).splitlines()
    assert len(widened[0]) == 71
    assert estimate_training_usage(1001, "float16") == {
        "model": 1001,
        "optimizer": 2002,
        "gradients": 1501,
        "step": 2002,
    }
    assert set(estimate_training_usage(1001, "int8").values()) == {-1}


def test_a_profiler_is_built_by_its_options() -> None:
    options = {"wait": 1, "warmup": 1, "active": 2, "repeat": 1, "skip_first": 1}
    built = ProfileKwargs(
        activities=["cpu"], schedule_option=options, with_flops=True
    ).build()
    assert isinstance(built, torch.profiler.profile) and built.with_flops
    words = [built.schedule(step).name for step in range(6)]
    assert words == ["NONE", "NONE", "WARMUP", "RECORD", "RECORD_AND_SAVE", "NONE"]
    with pytest.raises(
        ValueError,
        match=r"Invalid profiler activity: foo. Must be one of \['cpu', 'cuda'\]",
    ):
        ProfileKwargs(activities=["foo"]).build()


def test_a_map_says_which_ties_it_takes_into_account(
    capsys: pytest.CaptureFixture[str],
) -> None:
    infer_auto_device_map(Tied(), max_memory={"cpu": 1000}, verbose=True)
    printed_lines = capsys.readouterr().out.splitlines()
    assert (
        "  Found the relevant tied param groups [['a.weight', 'b.weight']]"
        in printed_lines
    )
    assert (
        "  So those parameters need to be taken into account ['b.weight']"
        in printed_lines
    )


def test_an_index_may_be_a_plain_table(tmp_path: Path) -> None:
    model, loaded_model = nn.Linear(2, 2), nn.Linear(2, 2)
    for name, tensor in model.state_dict().items():
        torch.save({name: tensor}, tmp_path / f"{name}.bin")
    index = tmp_path / "plain.json"
    index.write_text('{"weight": "weight.bin", "bias": "bias.bin"}')
    load_checkpoint_in_model(loaded_model, index)
    assert torch.equal(loaded_model.weight, model.weight)
    index.write_text('{"metadata": {}}')
    with pytest.raises(RuntimeError, match="not an index"):
        load_checkpoint_in_model(loaded_model, index)


def test_weights_without_metadata_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import save_file

    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "model.safetensors")
    load_checkpoint_in_model(nn.Linear(2, 2), tmp_path)
    assert "does not contain metadata" in caplog.text


def test_whole_numbers_stay_whole_whatever_the_dtype() -> None:
    module: Any = nn.BatchNorm1d(2)
    set_module_tensor_to_device(
        module, "num_batches_tracked", "cpu", value=torch.tensor(3), dtype=torch.float16
    )
    assert module.num_batches_tracked.dtype == torch.int64


def test_hooks_are_appended_to_what_is_there() -> None:
    class Named(ModelHook):
        def __init__(self, name: str, called_hooks: list[str]) -> None:
            self.name, self.said = name, called_hooks

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.said.append(self.name)
            return args, kwargs

    module: Any = nn.Linear(2, 2)
    called_hooks: list[str] = []
    for name in "abc":
        add_hook_to_module(module, Named(name, called_hooks), append=True)
    assert (
        isinstance(module._hf_hook.hooks[0], SequentialHook)
        and len(module._hf_hook.hooks) == 2
    )
    module(torch.ones(1, 2))
    assert called_hooks == ["a", "b", "c"]
    UserCpuOffloadHook(module, module._hf_hook).remove()
    assert not hasattr(module, "_hf_hook")
    assert remove_hook_from_module(module) is module


def test_numbered_checkpoints_are_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ProjectConfiguration("p", automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=config)
    accelerator.prepare(nn.Linear(1, 1))
    assert accelerator.save_state() == Path("p/checkpoints/checkpoint_0")
    accelerator.project_configuration.iteration = 0
    with pytest.raises(ValueError, match=r"checkpoint_0 \(0\) already exists"):
        accelerator.save_state()
    accelerator.project_configuration.iteration = 7
    assert accelerator.save_state() == Path("p/checkpoints/checkpoint_7")


def test_trackers_are_registered_if_they_are_trackers(
    recwarn: pytest.WarningsRecorder,
) -> None:
    class Mine(GeneralTracker):
        name, requires_logging_directory = "wandb", False

    with pytest.raises(NotImplementedError, match=r"class definition: `tracker`$"):
        Mine()
    with pytest.raises(
        ValueError,
        match="must be a subclass of `GeneralTracker`, but got <class 'int'>",
    ):
        register_tracker_class(int)
    registered = LOGGER_TYPE_TO_CLASS["wandb"]
    try:
        register_tracker_class(Mine)
    finally:
        LOGGER_TYPE_TO_CLASS["wandb"] = registered
    assert "'wandb' is already registered and will be overwritten" in str(
        recwarn.pop().message
    )


def test_a_tracker_is_still_there_when_training_has_ended() -> None:
    class Mine(GeneralTracker):
        name, requires_logging_directory, tracker = "mine", False, ()

    user_tracker = Mine()
    accelerator = Accelerator(cpu=True, log_with=user_tracker)
    accelerator.init_trackers("project")
    accelerator.end_training()
    assert accelerator.get_tracker("mine") is user_tracker


def test_all_names_of_utils_act() -> None:
    import accelerate.utils

    assert "prepare_data_loader" not in accelerate.utils.__all__


def test_a_folder_without_weights_is_not_found(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin"):
        accelerator.load_state(str(tmp_path))


def test_checkpoints_over_the_limit_are_counted_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    project = ProjectConfiguration(
        str(tmp_path), automatic_checkpoint_naming=True, total_limit=1
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(nn.Linear(1, 1))
    for _ in range(2):
        accelerator.save_state()
    assert [
        record.getMessage()
        for record in caplog.records
        if "Deleting" in record.getMessage()
    ] == ["[RANK 0] Deleting 1 checkpoints to make room for new checkpoint."]


def test_compiled_regions_are_a_copy_over_the_same_parameters() -> None:
    model = nn.Sequential(
        nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    )
    compiled = compile_regions(model, backend="eager")
    assert has_compiled_regions(compiled) and not has_compiled_regions(model)
    assert extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    assert [id(parameter) for parameter in compiled.parameters()] == [
        id(parameter) for parameter in model.parameters()
    ]


def test_a_forward_that_was_kept_comes_back_and_pickles() -> None:
    model: Any = nn.Linear(2, 2)
    model._original_forward = model.forward
    model.forward = convert_outputs_to_fp32(model.forward)
    pickle.dumps(extract_model_from_parallel(model, keep_fp32_wrapper=False))


def test_blocks_of_a_map_have_hooks_down_to_their_layers() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.BatchNorm1d(2))
    attach_align_device_hook_on_blocks(
        model, {"0": "cpu", "1": "cpu"}, {"0": False, "1": True}
    )
    hooks = {
        name: module._hf_hook
        for name, module in model.named_modules()
        if hasattr(module, "_hf_hook")
    }
    assert (
        sorted(hooks) == ["", "0", "0.0", "1"]
        and hooks[""].io_same_device
        and hooks["0"].place_submodules
    )
    assert sorted(hooks["1"].original_devices)[:2] == ["bias", "num_batches_tracked"]
    assert (
        hooks["0.0"].param_original_devices == {}
        and hooks["0.0"].tied_params_names == set()
    )


def test_hooks_of_gradients_are_registered_by_hand() -> None:
    module = Mock()
    DistributedDataParallelKwargs().register_comm_hook(module)
    module.register_comm_hook.assert_not_called()
    kinds = DDPCommunicationHookType
    DistributedDataParallelKwargs(
        comm_hook=kinds.POWER_SGD, comm_wrapper=kinds.FP16
    ).register_comm_hook(module)
    state, hook = (
        module.register_comm_hook.call_args.kwargs[name] for name in ("state", "hook")
    )
    assert (type(state).__name__, hook.__name__) == (
        "PowerSGDState",
        "fp16_compress_wrapper_hook",
    )


def test_an_accelerator_shows_its_flag_and_refuses_strangers() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.set_trigger()
    assert (
        accelerator.flag_tensor.item() == 1
        and accelerator.check_trigger()
        and accelerator.flag_tensor.item() == 0
    )
    assert (
        type(accelerator.get_state_dict(accelerator.prepare(nn.Linear(1, 1))))
        is OrderedDict
    )
    with pytest.raises(TypeError, match="`megatron_lm_plugin` must be"):
        Accelerator(cpu=True, megatron_lm_plugin=object())
    with pytest.warns(FutureWarning, match="Please use the `ParallelismConfig`"):
        Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin())
