"""What large clients override and replace acts: methods of subclasses, patches of classes, names of modules."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelerate.accelerator
import accelerate.data_loader
import accelerate.hooks
import accelerate.utils.modeling
import accelerate.utils.operations
from accelerate import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PartialState,
)
from accelerate.utils import TorchDynamoPlugin

pytestmark = pytest.mark.usefixtures("fresh_states")
# Any in this file: arguments of functions that are replaced.


def objects() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], Any]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(8.0).view(-1, 1)), batch_size=2)
    return model, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 1)


def train_a_step(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any
) -> None:
    initial_parameters = [
        parameter.detach().clone() for parameter in model.parameters()
    ]
    for (batch,) in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert all(
        not torch.equal(old, new)
        for old, new in zip(initial_parameters, model.parameters(), strict=True)
    )


class Recording(Accelerator):  # type: ignore[misc]  # loaded on first use
    """An Accelerator of a client, which overrides what prepares objects."""

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        CALLED.append("model")
        return super().prepare_model(model, *args, **kwargs)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        CALLED.append("loader")
        return super().prepare_data_loader(data_loader, *args, **kwargs)


CALLED: list[str] = []


@pytest.mark.parametrize("sharded", [False, True])
def test_methods_of_a_subclass_prepare_its_objects(sharded: bool) -> None:
    CALLED.clear()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None
    accelerator = Recording(cpu=True, fsdp_plugin=plugin)
    model, optimizer, loader, scheduler = accelerator.prepare(*objects())
    assert CALLED == ["model", "loader"]
    assert type(scheduler).__name__ == "AcceleratedScheduler"
    train_a_step(accelerator, model, optimizer, loader)


def test_a_class_level_patch_passes_a_model_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Accelerator, "prepare_model", lambda self, model, *args, **kwargs: model
    )
    accelerator = Accelerator(cpu=True)
    training_objects = objects()
    model, optimizer, loader, _ = accelerator.prepare(*training_objects)
    assert model is training_objects[0]
    train_a_step(accelerator, model, optimizer, loader)


def test_the_number_of_processes_of_a_subclass_divides_loaders() -> None:
    class OneOfTwo(Accelerator):  # type: ignore[misc]  # loaded on first use
        num_processes = property(lambda self: 2)

    accelerator = OneOfTwo(cpu=True)
    loader = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
    )
    assert [batch.tolist() for (batch,) in loader] == [[0, 1], [4, 5]]


def test_a_replaced_prepare_data_loader_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped = accelerate.data_loader.prepare_data_loader
    called = []

    def replaced(*args: Any, **kwargs: Any) -> Any:
        called.append(sorted(kwargs))
        return shipped(*args, **kwargs)

    monkeypatch.setattr(accelerate.data_loader, "prepare_data_loader", replaced)
    monkeypatch.setattr(accelerate.accelerator, "prepare_data_loader", replaced)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(objects()[2])
    assert len(called) == 1
    assert {
        "num_processes",
        "process_index",
        "dispatch_batches",
        "even_batches",
    } <= set(called[0])


@pytest.mark.parametrize(
    "name",
    [
        "_prepare_one",
        "_prepare_fsdp2",
        "_prepare_tp",
        "_prepare_cp",
        "_prepare_deepspeed",
    ],
)
def test_a_replaced_step_is_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = getattr(Accelerator, name)
    called = []

    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return shipped(self, *args, **kwargs)

    monkeypatch.setattr(Accelerator, name, replaced)
    plugin = (
        FullyShardedDataParallelPlugin(fsdp_version=2)
        if name == "_prepare_fsdp2"
        else None
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if name in ("_prepare_tp", "_prepare_cp"):
        monkeypatch.setattr(type(accelerator.ctx.mesh), "size", lambda self, axis: 2)
        getattr(accelerator, "_prepare_all")((), None)  # noqa: B009  a method of its own
    elif name == "_prepare_deepspeed":
        monkeypatch.setattr(Accelerator, "distributed_type", "DEEPSPEED")
        getattr(accelerator, "_prepare_all")((), None)  # noqa: B009
    else:
        train_a_step(accelerator, *accelerator.prepare(*objects())[:3])
    assert called and set(called) == {name}


def test_a_client_shards_models_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import fully_shard

    def replaced(accelerator: Any, model: nn.Module) -> nn.Module:
        fully_shard(model)
        return model

    monkeypatch.setattr(accelerate.accelerator, "fsdp2_prepare_model", replaced)
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)
    )
    model, optimizer, loader, _ = accelerator.prepare(*objects())
    assert type(model).__name__ == "FSDPLinear"
    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]
    assert [id(parameter) for parameter in parameters] == [
        id(parameter) for parameter in model.parameters()
    ]
    for (batch,) in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def test_arguments_of_the_compiler_are_those_of_a_patch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TorchDynamoPlugin, "to_kwargs", lambda self: {"dynamic": True})
    accelerator = Accelerator(
        cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager", fullgraph=True)
    )
    compiled = accelerator.config.dynamo
    assert (compiled.backend, compiled.dynamic, compiled.fullgraph) == (
        "eager",
        True,
        False,
    )


def test_sizes_of_a_mesh_are_a_dictionary_for_patches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = ParallelismConfig(dp_shard_size=2)
    getattr(sizes, "_sizes")["ep"] = 2  # noqa: B009  as clients write it
    assert getattr(sizes, "_sizes")["ep"] == 2  # noqa: B009
    monkeypatch.setattr(ParallelismConfig, "_get_mesh", lambda self: (("ep",), (1,)))
    monkeypatch.setattr(ParallelismConfig, "dp_dim_names", property(lambda self: []))
    monkeypatch.setattr(
        ParallelismConfig, "dp_shard_cp_dim_names", property(lambda self: [])
    )
    monkeypatch.setattr(ParallelismConfig, "dp_cp_dim_names", property(lambda self: []))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = sizes.build_device_mesh("cpu")
    assert mesh is not None and mesh.mesh_dim_names == ("ep",)


def test_private_names_that_clients_use() -> None:
    assert (
        getattr(accelerate.utils.modeling, "_get_proper_dtype")("torch.float16")  # noqa: B009
        == torch.float16
    )
    assert "to" in getattr(accelerate.hooks, "_accelerate_added_attributes")  # noqa: B009


def test_replaced_collectives_act(monkeypatch: pytest.MonkeyPatch) -> None:
    class TwoRanks:
        size = 2

    monkeypatch.setattr("accelerate._impl.tensors._world_comm", TwoRanks)
    monkeypatch.setattr(
        accelerate.utils.operations, "_gpu_gather", lambda tensor: "gathered"
    )
    monkeypatch.setattr(
        accelerate.utils.operations,
        "_gpu_broadcast",
        lambda data, src=0: ("broadcast", src),
    )
    assert accelerate.utils.operations.gather(torch.ones(1)) == "gathered"
    assert accelerate.utils.operations.broadcast(torch.ones(1), from_process=1) == (
        "broadcast",
        1,
    )


def test_a_context_of_a_client_that_divides_sequences_is_entered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered = []

    @contextmanager
    def divide(**arguments: Any) -> Iterator[None]:
        entered.append(arguments)
        yield

    def prepare_cp(self: Any, *args: Any) -> tuple[Any, ...]:
        self._cp_context = divide
        return args

    monkeypatch.setattr(Accelerator, "_prepare_cp", prepare_cp)
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(type(accelerator.ctx.mesh), "size", lambda self, axis: 2)
    getattr(accelerator, "_prepare_all")((), None)  # noqa: B009  a method of its own
    batch = torch.ones(2, 4)
    with accelerator.maybe_context_parallel(buffers=[batch], buffer_seq_dims=[1]):
        pass
    assert entered == [
        {"buffers": [batch], "buffer_seq_dims": [1], "no_restore_buffers": None}
    ]


def test_the_number_of_experts_is_left_to_a_patch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_EP_SIZE", "2")
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig())
    assert accelerator.ctx.mesh.ep == 1
    sizes = ParallelismConfig()
    getattr(sizes, "_sizes")["ep"] = 1  # noqa: B009  as clients write it
    getattr(sizes, "_set_size")("ep", 2)  # noqa: B009
    assert getattr(sizes, "ep_size") == 2  # noqa: B009


def test_a_replaced_prepare_data_loader_sees_the_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped, meshes = accelerate.data_loader.prepare_data_loader, []

    def replaced(*args: Any, torch_device_mesh: Any = None, **kwargs: Any) -> Any:
        meshes.append(torch_device_mesh)
        return shipped(*args, **kwargs)

    monkeypatch.setattr(accelerate.accelerator, "prepare_data_loader", replaced)
    monkeypatch.setattr(
        ParallelismConfig, "get_device_mesh", lambda self, device_type=None: "the mesh"
    )
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig())
    accelerator.prepare(objects()[2])
    assert meshes == ["the mesh"]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("accelerate.accelerator", "convert_model_to_fp8_ao"),  # axolotl
        ("accelerate.big_modeling", "attach_align_device_hook_on_blocks"),  # ms-swift
        ("accelerate.utils.fsdp_utils", "fsdp2_load_full_state_dict"),  # simpletuner
        ("accelerate.utils.transformer_engine", "convert_model"),  # optimum-habana
    ],
)
def test_what_is_replaced_in_vain_is_named(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UserWarning, match=rf"{module}\.{name} was replaced, but"):
        monkeypatch.setattr(
            importlib.import_module(module), name, lambda *args, **kwargs: None
        )


def test_what_acts_is_replaced_without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        ("accelerate.accelerator", "fsdp2_prepare_model"),
        ("accelerate.data_loader", "prepare_data_loader"),
    ):
        monkeypatch.setattr(
            importlib.import_module(module), name, lambda *args, **kwargs: None
        )


def test_models_that_a_client_has_sharded_over_a_mesh_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shipped = Accelerator.prepare_model

    def pass_through(self: Any, model: Any, **_: Any) -> Any:
        return shipped(self, model, device_placement=False, evaluation_mode=True)

    monkeypatch.setattr(Accelerator, "prepare_model", pass_through)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    training_objects = objects()
    fully_shard(training_objects[0], mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(training_objects[0].parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(
        training_objects[0], optimizer, training_objects[2]
    )
    assert model is training_objects[0]
    for (batch,) in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def test_masks_are_dropped_by_hooks_that_clients_find_by_their_module() -> None:
    class Attention(nn.Module):
        def forward(
            self, x: torch.Tensor, attention_mask: Any = None, is_causal: bool = False
        ) -> Any:
            return x, attention_mask, is_causal

    big_modeling = importlib.import_module("accelerate.big_modeling")
    model = nn.ModuleDict({"self_attn": Attention(), "other": Attention()})
    big_modeling._attach_context_parallel_hooks(model)
    x = torch.ones(1)
    assert model["self_attn"](x, attention_mask=x) == (x, None, True)
    assert model["other"](x, attention_mask=x) == (x, x, False)
    hooks = list(model["self_attn"]._forward_pre_hooks.values())
    assert [hook.__module__ for hook in hooks] == ["accelerate.big_modeling"]
    vars(model)["config"] = SimpleNamespace(
        layer_types=["full_attention", "sliding_attention", "linear_attention"]
    )
    with pytest.raises(
        ValueError, match=r"\['linear_attention', 'sliding_attention'\]"
    ):
        big_modeling._attach_context_parallel_hooks(model)
    with pytest.raises(ValueError, match=r"does not support .*\['linear_attention'\]"):
        big_modeling._refuse_recurrent_layers_under_sequence_parallelism(model)


def test_a_replaced_backend_and_other_private_names_of_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        PartialState,
        "_prepare_backend",
        lambda self, *args, **kwargs: ("mine", "MULTI_CPU"),
    )
    accelerator = Accelerator(
        cpu=True,
        split_batches=getattr(accelerate.accelerator, "_split_batches"),  # noqa: B009
    )
    assert (accelerator.process.ctx.world.size, accelerator.distributed_type) == (
        1,
        "MULTI_CPU",
    )
    model = nn.Linear(1, 1)
    assert accelerator._get_named_parameters(model) == dict(model.named_parameters())
    addresses = accelerator._get_named_parameters(model, drop_refs=True)
    assert addresses == {
        name: parameter.data_ptr() for name, parameter in model.named_parameters()
    }
