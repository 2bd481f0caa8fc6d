"""Big models as the original has them: maps, hooks, empty weights, tensors, plans."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import accelerate
from accelerate import (
    big_modeling,
    dispatch_model,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
)
from accelerate.commands.estimate import estimate_training_usage
from accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_module,
)
from accelerate.utils import (
    BnbQuantizationConfig,
    OffloadedWeightsLoader,
    bnb,
    modeling,
)
from accelerate.utils.modeling import set_module_tensor_to_device
from accelerate.utils.other import compile_regions, extract_model_from_parallel

# Any in this file: attributes that the hooks set on modules, and configurations.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(3, 4),
            nn.BatchNorm1d(4),
            nn.Linear(4, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Say what it does."""
        return torch.as_tensor(self.last(self.norm(self.first(x))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight


def devices(model: nn.Module) -> set[str]:
    return {str(tensor.device) for tensor in model.parameters()}


def test_maps_may_name_the_meta_device() -> None:
    assert devices(dispatch_model(Net(), {"": "meta"})) == {"meta"}
    model: Any = dispatch_model(Net(), {"first": "cpu", "norm": "meta", "last": "meta"})
    assert devices(model) == {"meta"} and model.first._hf_hook.offload
    assert model.first._hf_hook.weights_map["weight"].device.type == "cpu"
    model = dispatch_model(Net(), {"": "cpu"}, main_device="meta", force_hooks=True)
    assert str(model._hf_hook.execution_device) == "meta"


def test_empty_weights_cannot_be_moved_to_a_device() -> None:
    with init_empty_weights():
        model = Net()
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        dispatch_model(model, {"": "cpu"})
    with pytest.raises(RuntimeError):  # torch's own kind of error
        model(torch.ones(2, 3))
    with pytest.raises(ValueError, match="weight is on the meta device"):
        modeling.get_state_dict_offloaded_model(model)


def test_hooks_of_a_dispatched_model_know_its_ties(tmp_path: Path) -> None:
    device_map = {"first": "cpu", "last": "disk"}
    model: Any = dispatch_model(Tied(), device_map, offload_dir=tmp_path)
    assert model.last._hf_hook.tied_params_names == {"weight"}
    assert list(model._hf_hook.tied_params_map) == [model.first.weight.data_ptr()]


def test_moving_a_dispatched_model_warns_of_devices_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model: Any = dispatch_model(Net(), {"": "cpu"}, force_hooks=True)
    caplog.clear()
    assert (
        model.to(torch.float16).first.weight.dtype == torch.float16
        and not caplog.records
    )
    model.to("cpu")
    assert "shouldn't move a model" in caplog.text
    assert model.to.__name__ == "to" and model.cuda.__name__ == "cuda"


def test_maps_are_worked_out_from_named_arguments(tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "pytorch_model.bin")
    with (
        patch(
            "accelerate.big_modeling.get_balanced_memory", return_value={"cpu": 1000}
        ) as balanced,
        patch(
            "accelerate.big_modeling.infer_auto_device_map", return_value={"": "cpu"}
        ) as inferred,
    ):
        load_checkpoint_and_dispatch(
            Net(), tmp_path, device_map="auto", no_split_module_classes=["Net"]
        )
    options = {"max_memory": None, "no_split_module_classes": ["Net"], "dtype": None}
    assert balanced.call_args.kwargs == {**options, "low_zero": False}
    assert inferred.call_args.kwargs == {
        **options,
        "max_memory": {"cpu": 1000},
        "offload_buffers": False,
    }


def test_buffers_are_included_by_torchs_default_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register_methods = nn.Module.register_parameter, nn.Module.register_buffer
    with init_empty_weights(include_buffers=True) as nothing:
        assert (
            nn.Module.register_parameter,
            nn.Module.register_buffer,
        ) == register_methods and nothing is None
        assert nn.BatchNorm1d(2).running_mean.is_meta  # type: ignore[union-attr]
    # a decorator, too
    assert init_empty_weights(include_buffers=True)(Net)().norm.running_var.is_meta
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "1")
    for block in (init_empty_weights(), init_on_device(torch.device("meta"))):
        with block:
            assert torch.zeros(1).is_meta


def test_a_hooked_forward_has_the_documentation_of_the_modules() -> None:
    assert add_hook_to_module(Net(), ModelHook()).forward.__doc__ == "Say what it does."


def test_hooks_of_a_sequence_are_detached_in_order() -> None:
    order: list[int] = []

    class Counting(ModelHook):
        def __init__(self, number: int) -> None:
            self.number = number

        def detach_hook(self, module: nn.Module) -> nn.Module:
            order.append(self.number)
            return module

    model = add_hook_to_module(Net(), SequentialHook(Counting(1), Counting(2)))
    remove_hook_from_module(model)
    assert order == [1, 2]


def test_hooks_for_a_device_move_the_weights_and_see_buffers() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    attach_execution_device_hook(model, "meta")
    assert devices(model) == {"meta"} and isinstance(
        model[1]._hf_hook, AlignDevicesHook
    )


def test_the_root_of_offloaded_blocks_gives_outputs_back_to_their_device() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2))
    attach_align_device_hook_on_blocks(
        model, {"": "cpu"}, {"": True}, offload_buffers=True
    )
    assert model._hf_hook.io_same_device and model[0]._hf_hook.offload_buffers
    model = nn.Sequential(nn.Linear(2, 2))
    attach_align_device_hook_on_blocks(
        model, {"0": "cpu"}, {"0": False}, offload_buffers=True
    )
    assert model[0]._hf_hook.offload_buffers


def test_skipped_keys_are_left_at_any_depth_and_in_the_output() -> None:
    input_devices: list[str] = []

    class Deep(nn.Module):
        def forward(self, x: Tensor, options: dict[str, Tensor]) -> dict[str, Tensor]:
            input_devices.extend(
                str(tensor.device) for tensor in (x, options["kept"], options["moved"])
            )
            return {"kept": torch.ones(1, device="meta"), "moved": x}

    model = add_hook_to_module(Deep(), AlignDevicesHook("meta", skip_keys="kept"))
    model(torch.ones(1), options={"kept": torch.ones(1), "moved": torch.ones(1)})
    assert input_devices == ["meta", "cpu", "meta"]
    model = add_hook_to_module(
        Deep(), AlignDevicesHook("cpu", io_same_device=True, skip_keys=["kept"])
    )
    moved_output = model(
        torch.ones(1), options={"kept": torch.ones(1), "moved": torch.ones(1)}
    )
    assert moved_output["kept"].is_meta and not moved_output["moved"].is_meta


def test_an_earlier_model_goes_back_when_it_is_away_from_the_host() -> None:
    assert CpuOffload("meta").execution_device == "meta"
    earlier, handle = accelerate.cpu_offload_with_hook(Net(), "meta")
    later, _ = accelerate.cpu_offload_with_hook(Net(), "meta", prev_module_hook=handle)
    with patch.object(handle, "offload") as offload:
        later(torch.ones(2, 3))
        assert not offload.called, "it is on the host"
        earlier(torch.ones(2, 3))
        later(torch.ones(2, 3))
    assert offload.call_count == 1


def test_a_tensor_is_set_as_a_new_parameter_of_its_class() -> None:
    class Own(nn.Parameter):
        pass

    layer: Any = nn.Linear(2, 2)
    layer.weight = Own(torch.ones(2, 2))
    layer.weight.note = "lost"
    value = nn.Parameter(torch.zeros(2, 2))
    set_module_tensor_to_device(layer, "weight", "cpu", value=value)
    assert (
        type(layer.weight) is Own
        and layer.weight is not value
        and not hasattr(layer.weight, "note")
    )
    set_module_tensor_to_device(layer, "bias", "meta", dtype=torch.float16)
    assert layer.bias.dtype == torch.float16
    set_module_tensor_to_device(
        layer, "weight", "cpu", value=value, fp16_statistics=torch.ones(2)
    )
    statistics: Any = layer.weight
    assert torch.equal(statistics.SCB, torch.ones(2))


def test_modules_kept_in_fp32_are_named_by_their_path(tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "pytorch_model.bin")
    model = Net()
    options: dict[str, Any] = {
        "dtype": torch.float16,
        "keep_in_fp32_modules": ["first", "last.weight", "bias"],
    }
    accelerate.load_checkpoint_in_model(model, tmp_path, {"": "cpu"}, **options)
    wide = [
        name
        for name, parameter in model.named_parameters()
        if parameter.dtype == torch.float32
    ]
    assert wide == ["first.weight", "first.bias", "last.weight"]


def test_ties_that_a_map_or_a_model_breaks_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save(Tied().state_dict(), tmp_path / "pytorch_model.bin")
    device_map = {"first": "cpu", "last": "disk"}
    accelerate.load_checkpoint_in_model(Tied(), tmp_path, device_map, tmp_path / "away")
    assert (
        "Tied parameters are on different devices: {'first.weight': 'cpu', 'last.weight': 'disk'}"
        in caplog.text
    )

    class PreTrainedModel(Net):
        config = SimpleNamespace(tie_word_embeddings=True)

        def get_output_embeddings(self) -> nn.Module:
            return self.last

    accelerate.infer_auto_device_map(PreTrainedModel(), {"cpu": 1000})
    assert "The model weights are not tied" in caplog.text
    foreign: Any = Net()
    foreign.config, foreign.get_output_embeddings = (
        PreTrainedModel.config,
        lambda: foreign.last,
    )
    assert not modeling.check_tied_parameters_in_config(foreign), (
        "only transformers' models are asked"
    )
    PreTrainedModel.config = SimpleNamespace(
        is_encoder_decoder=True, tie_encoder_decoder=True
    )
    assert modeling.check_tied_parameters_in_config(PreTrainedModel())


def test_a_tenth_of_a_single_gpu_stays_free_if_no_limits_are_given() -> None:
    with patch(
        "accelerate.utils.modeling.get_max_memory",
        side_effect=lambda limits: {0: 300, "cpu": 1000},
    ):
        assert modeling.get_balanced_memory(Net()) == {0: 270.0, "cpu": 1000}
        assert modeling.get_balanced_memory(Net(), {0: 300, "cpu": 1000}) == {
            0: 300,
            "cpu": 1000,
        }


def test_a_map_over_one_process_names_every_module() -> None:
    model = nn.Sequential(*[nn.Linear(10, 10) for _ in range(6)])
    assert accelerate.inference.generate_device_map(model, 1) == dict.fromkeys(
        map(str, range(6)), "cpu"
    )


def test_linear_layers_are_left_by_their_name_or_a_part_of_their_path(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("bitsandbytes")
    model: Any = nn.ModuleDict(
        {"sub": nn.ModuleDict({"x": nn.Linear(2, 2), "y": nn.Linear(2, 2)})}
    )
    config = BnbQuantizationConfig(load_in_8bit=True)
    bnb.replace_with_bnb_layers(model, config, modules_to_not_convert=["sub"])
    assert (
        type(model.sub.x) is nn.Linear and "no linear modules were found" in caplog.text
    )
    bnb.replace_with_bnb_layers(model, config, modules_to_not_convert=["x"])
    assert [type(layer).__name__ for layer in model.sub.values()] == [
        "Linear",
        "Linear8bitLt",
    ]


def test_quantization_needs_a_library_that_is_new_enough(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for bits, kind, error in (
        (8, {"load_in_8bit": True}, ImportError),
        (4, {"load_in_4bit": True}, ValueError),
    ):
        with (
            patch(
                f"accelerate.utils.bnb.is_{bits}bit_bnb_available", return_value=False
            ),
            pytest.raises(error),
        ):
            bnb.load_and_quantize_model(Net(), BnbQuantizationConfig(**kind))


def test_autocast_that_is_asked_for_is_given_without_a_precision() -> None:
    accelerate.Accelerator(cpu=True)
    assert isinstance(
        modeling.get_mixed_precision_context_manager(native_amp=True), torch.autocast
    )


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict(
            {"blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])}
        )


def test_the_outermost_module_shows_what_was_compiled_by_regions() -> None:
    model: Any = Blocks()
    compiled: Any = compile_regions(model, backend="eager")
    assert compiled._orig_mod is model and "_orig_mod" not in compiled.body.__dict__
    wrapped: Any = compile_regions(nn.DataParallel(model), backend="eager")
    assert extract_model_from_parallel(wrapped, keep_torch_compile=False) is model
    assert type(wrapped._orig_mod) is nn.DataParallel
    assert (
        extract_model_from_parallel(wrapped) is wrapped and wrapped._orig_mod is model
    )
    assert list(wrapped.state_dict()) == [
        f"module.{name}" for name in compiled.state_dict()
    ]


def test_a_graph_can_be_edited_under_a_hook() -> None:
    class Add(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    graph: Any = torch.fx.symbolic_trace(Add())
    add_hook_to_module(graph, ModelHook())
    assert (
        list(inspect.signature(graph.forward).parameters) == ["x"]
        and graph.forward.__name__ == "forward"
    )
    next(node for node in graph.graph.nodes if node.op == "call_function").update_arg(
        1, 5
    )
    graph.recompile()
    assert graph(torch.ones(1)) == 6
    assert (
        remove_hook_from_module(graph)(torch.ones(1)) == 6
        and "forward" not in graph.__dict__
    )


def test_hooks_that_are_removed_bring_buffers_back_from_the_meta_device() -> None:
    model: Any = accelerate.cpu_offload(Net(), torch.device("meta"))
    assert model.norm.running_var.is_meta
    remove_hook_from_module(model, recurse=True)
    assert torch.equal(model.norm.running_var, torch.ones(4)) and devices(model) == {
        "cpu"
    }


def test_a_single_gpu_that_keeps_a_tenth_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "accelerate.utils.modeling")
    with patch(
        "accelerate.utils.modeling.get_max_memory",
        side_effect=lambda limits: {0: 300, "cpu": 1000},
    ):
        modeling.get_balanced_memory(Net())
    assert "We will use 90% of the memory on device 0" in caplog.text


def test_a_cpu_with_an_index_is_another_device() -> None:
    expected_sameness = {
        ("cpu", "cpu"): True,
        ("cpu:0", "cpu"): False,
        ("cuda", "cuda:0"): True,
        ("cuda", "meta"): False,
    }
    for (first, second), expected in expected_sameness.items():
        assert (
            modeling.check_device_same(torch.device(first), torch.device(second))
            is expected
        )


def test_a_folder_for_nothing_is_made(tmp_path: Path) -> None:
    accelerate.utils.offload_state_dict(tmp_path / "new", {})
    assert list((tmp_path / "new").iterdir()) == []


def test_training_in_fp8_is_estimated_without_ms_amp_only() -> None:
    assert estimate_training_usage(1000, "fp8") == estimate_training_usage(
        1000, "float16"
    )
    assert estimate_training_usage(1000, "fp8", "O1")["step"] == -1


@pytest.mark.parametrize("kind", ["cuda", "mps", "npu", "xpu"])
def test_the_cache_of_the_device_that_is_there_is_cleared(kind: str) -> None:
    available = patch(f"accelerate.utils.memory.is_{kind}_available", return_value=True)
    with available, patch(f"torch.{kind}", create=True) as module:
        accelerate.utils.release_memory()
    module.empty_cache.assert_called_once_with()


def test_names_that_tests_look_at() -> None:
    for module in (big_modeling, modeling, bnb):
        assert module.logger is logging.getLogger(module.__name__)
    weights = {"a": torch.ones(1)}
    assert OffloadedWeightsLoader(state_dict=weights).state_dict is weights
    assert (
        accelerate.find_executable_batch_size(lambda batch_size: batch_size).__name__
        == "decorator"
    )


class Positions(nn.Module):
    """A module with a buffer that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.linear(x) + self.kept + self.passing)


def test_buffers_of_no_state_dict_stay_when_buffers_go_to_the_disk(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(Positions())
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    options: dict[str, Any] = {
        "offload_folder": tmp_path / "away",
        "offload_buffers": True,
    }
    loaded: Any = load_checkpoint_and_dispatch(
        nn.Sequential(Positions()), tmp_path, {"0": "disk"}, **options
    )
    assert loaded[0].kept.is_meta and not loaded[0].passing.is_meta
    assert torch.equal(loaded(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert not (tmp_path / "away" / "0.passing.dat").exists()


def test_buffers_that_stay_are_not_written_beside_loaded_weights(
    tmp_path: Path,
) -> None:
    torch.save(Net().state_dict(), tmp_path / "pytorch_model.bin")
    device_map = {"first": "cpu", "norm": "disk", "last": "cpu"}
    load_checkpoint_and_dispatch(
        Net(), tmp_path, device_map, offload_folder=tmp_path / "away"
    )
    assert {file.name for file in (tmp_path / "away").iterdir()} == {
        "norm.weight.dat",
        "norm.bias.dat",
        "index.json",
    }


def test_weights_may_be_loaded_to_the_meta_device(tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "pytorch_model.bin")
    model = Net()
    accelerate.load_checkpoint_in_model(
        model, tmp_path, {"first": "meta", "norm": "cpu", "last": "meta"}
    )
    assert model.first.weight.is_meta and not model.norm.weight.is_meta


def test_unknown_weights_are_refused_as_tensors_of_the_module(tmp_path: Path) -> None:
    torch.save(
        {**Net().state_dict(), "first.other": torch.ones(1)},
        tmp_path / "pytorch_model.bin",
    )
    with pytest.raises(
        ValueError, match="does not have a parameter or a buffer named other"
    ):
        accelerate.load_checkpoint_in_model(Net(), tmp_path, {"": "cpu"}, strict=True)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        accelerate.load_checkpoint_in_model(Net(), tmp_path, strict=True)


def test_a_module_named_beside_the_whole_model_has_one_hook() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    attach_align_device_hook_on_blocks(
        model, {"": "cpu", "1": "cpu"}, {"": False, "1": False}
    )
    assert (
        isinstance(model[1]._hf_hook, AlignDevicesHook)
        and model[1]._hf_hook.place_submodules
    )


def test_a_tied_weight_that_stays_is_not_shown_as_offloaded(tmp_path: Path) -> None:
    model: Any = dispatch_model(
        Tied(), {"first": "cpu", "last": "disk"}, offload_dir=tmp_path
    )
    assert model.last.weight is model.first.weight and not model.first.weight.is_meta
    assert model.last.bias.is_meta


@pytest.mark.parametrize("buffers", [True, False])
def test_offloaded_weights_follow_the_dtype_of_the_module(buffers: bool) -> None:
    model: Any = accelerate.cpu_offload(
        Net().eval(), torch.device("cpu"), offload_buffers=buffers
    )
    assert model.double()(torch.ones(2, 3, dtype=torch.float64)).dtype == torch.float64
    remove_hook_from_module(model, recurse=True)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float64}


def test_limits_are_the_memory_that_is_free() -> None:
    pytest.importorskip("psutil")
    with patch("psutil.virtual_memory", return_value=SimpleNamespace(available=1000)):
        assert modeling.get_max_memory()["cpu"] == 1000
        with patch("accelerate.utils.modeling.is_mps_available", return_value=True):
            assert modeling.get_max_memory() == {"mps": 1000}


def test_memory_that_was_missing_is_told_as_whole_bytes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "accelerate.utils.modeling")
    accelerate.infer_auto_device_map(Net(), {"cpu": 10.0})
    assert "- cpu: 236 bytes required" in caplog.text or ".0 bytes" not in caplog.text


def test_loading_and_dispatching_are_called_by_name() -> None:
    model = Net()
    with (
        patch("accelerate.big_modeling.load_checkpoint_in_model") as load,
        patch(
            "accelerate.big_modeling.dispatch_model",
            side_effect=lambda model, **options: model,
        ) as dispatch,
    ):
        dispatched = load_checkpoint_and_dispatch(
            model, "file", {"": "cpu"}, dtype=torch.float16, offload_folder="away"
        )
    assert dispatched is model and load.call_args.args == (model, "file")
    assert (
        load.call_args.kwargs["dtype"] == torch.float16
        and load.call_args.kwargs["broadcast_from_rank0"] is False
    )
    assert dispatch.call_args.kwargs[
        "offload_dir"
    ] == "away" and dispatch.call_args.kwargs["device_map"] == {"": "cpu"}


def test_quantized_models_know_the_named_ways_only() -> None:
    config = BnbQuantizationConfig(load_in_8bit=True)
    assert list(
        bnb.get_quantized_model_device_map(Net(), config, "balanced_low_0")
    ) == [""]
    with pytest.raises(ValueError, match="balanced_low_0"):
        bnb.get_quantized_model_device_map(Net(), config, "foo")


def test_layers_of_transformer_engine_need_it() -> None:
    if accelerate.utils.is_transformer_engine_available():
        pytest.skip("Transformer Engine is installed")
    with pytest.raises(ImportError, match="transformer_engine"):
        accelerate.utils.has_transformer_engine_layers(Net())
    with pytest.raises(ImportError, match="transformer_engine"):
        accelerate.utils.apply_fp8_autowrap(Net(), None)
