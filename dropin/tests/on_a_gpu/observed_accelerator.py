"""What an Accelerator is and does on a device: its attributes, operations on tensors, loaders, one process of torchrun."""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict, namedtuple
from typing import Any

import torch
from observing import (
    CUDA,
    DEVICE,
    Net,
    Seen,
    batch,
    checksum,
    dataset,
    loader,
    loss_of,
    noted,
    observe,
    parts,
)
from torch import Tensor, nn

ATTRIBUTES = (
    "device", "num_processes", "process_index", "local_process_index", "is_main_process", "is_local_main_process",
    "is_last_process", "distributed_type", "mixed_precision", "use_distributed", "native_amp", "scaler", "multi_device",
    "gradient_accumulation_steps", "sync_gradients", "optimizer_step_was_skipped", "step_scheduler_with_optimizer",
    "non_blocking", "even_batches", "use_seedable_sampler", "dispatch_batches", "split_batches", "project_dir",
    "logging_dir", "save_iteration", "should_save_model", "is_fsdp2", "torch_device_mesh", "fp8_backend",
    "is_composable_parallelism_enabled", "has_lomo_optimizer", "flag_to_load_checkpoint", "rng_types",
    "device_placement", "use_stateful_dataloader", "autocast_handler", "scaler_handler", "ddp_handler", "fp8_enabled",
    "init_handler", "profile_handler", "has_fp8_handler", "trackers", "log_with", "parallelism_config", "step",
    "delayed_fp8_autocast", "fp8_recipe_handler", "tensor_parallel_rank", "data_parallel_rank", "context_parallel_rank",
)  # fmt: skip
STATE = (
    "device", "backend", "debug", "distributed_type", "num_processes", "process_index", "local_process_index", "fork_launched",
    "initialized", "is_last_process", "is_main_process", "is_local_main_process", "use_distributed", "default_device",
    "_cpu",
)  # fmt: skip


def attributes(see: Seen, name: str, owner: object, names: tuple[str, ...]) -> None:
    """Note attributes of an object one by one."""
    for attribute in names:
        see(
            f"{name}.{attribute}", lambda attribute=attribute: getattr(owner, attribute)
        )


@observe("state")
def versions(see: Seen) -> None:
    import accelerate

    see("accelerate", accelerate.__version__.partition("+")[0])
    from accelerate.test_utils import testing

    see("torch_device", lambda: testing.torch_device)
    see("device_count", lambda: testing.device_count)
    see("memory", lambda: testing.memory_allocated_func())


@observe("state")
def attributes_of_an_accelerator(see: Seen) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    attributes(see, "it", accelerator, ATTRIBUTES)
    see("repr of the state", repr(accelerator.state).splitlines())
    see(
        "state",
        sorted(key for key in accelerator.state.__dict__ if not key.startswith("_")),
    )
    see("matmul.allow_tf32", torch.backends.cuda.matmul.allow_tf32)
    see("cudnn.benchmark", torch.backends.cudnn.benchmark)
    see("current device", lambda: torch.cuda.current_device())


def _attributes_in(precision: str, see: Seen) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision=precision)
    names = (
        "mixed_precision",
        "native_amp",
        "scaler",
        "device",
        "autocast_handler",
        "scaler_handler",
        "fp8_enabled",
    )
    attributes(see, "it", accelerator, names)
    see("state", accelerator.state.mixed_precision)
    see("again", lambda: Accelerator(mixed_precision="no"))
    see("repr", repr(accelerator.state).splitlines())
    see("scale", lambda: accelerator.scaler.get_scale())
    see("variable", os.environ.get("ACCELERATE_MIXED_PRECISION"))


@observe("state")
def attributes_in_fp16(see: Seen) -> None:
    _attributes_in("fp16", see)


@observe("state")
def attributes_in_bf16(see: Seen) -> None:
    _attributes_in("bf16", see)


@observe("state")
def a_partial_state(see: Seen) -> None:
    from accelerate import PartialState

    state = PartialState()
    attributes(see, "it", state, STATE)
    see("repr", repr(state).splitlines())
    see("set_device", lambda: (state.set_device(), state.device))
    see("destroy", lambda: state.destroy_process_group())
    see("second", lambda: PartialState(cpu=True))
    see("dict", sorted(state.__dict__))
    PartialState._reset_state()
    see("after", lambda: PartialState.__new__(PartialState).initialized)
    see("missing", lambda: PartialState.__new__(PartialState).device)


@observe("state")
def a_state_on_the_cpu(see: Seen) -> None:
    from accelerate import Accelerator, PartialState

    attributes(see, "partial", PartialState(cpu=True), STATE)
    PartialState._reset_state()
    accelerator = Accelerator(cpu=True)
    attributes(
        see, "it", accelerator, ("device", "distributed_type", "mixed_precision")
    )
    model, _optimizer, batches, _scheduler = accelerator.prepare(*parts())
    see("model", next(model.parameters()).device)
    see("batches", [batch["x"].device for batch in batches])
    see("again", lambda: Accelerator().device)
    see("other", lambda: Accelerator(cpu=False).device)


@observe("state")
def a_state_by_variables(see: Seen) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    for name, value in (
        ("ACCELERATE_USE_CPU", "1"),
        ("ACCELERATE_MIXED_PRECISION", "bf16"),
        ("ACCELERATE_MIXED_PRECISION", "fp16"),
        ("ACCELERATE_TORCH_DEVICE", "cuda:0" if CUDA else "cpu"),
        ("ACCELERATE_DEBUG_MODE", "1"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3"),
        ("ACCELERATE_DYNAMO_BACKEND", "eager"),
    ):
        AcceleratorState._reset_state(True)
        os.environ[name] = value
        accelerator = Accelerator()
        names = ("device", "mixed_precision", "gradient_accumulation_steps", "scaler")
        attributes(see, f"{name}={value}", accelerator, names)
        see(f"{name}={value}, debug", accelerator.state.debug)
        see(f"{name}={value}, backend", accelerator.state.dynamo_plugin.backend)
        del os.environ[name]


@observe("state")
def fp16_on_the_cpu_beside_a_gpu(see: Seen) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer, batches, _ = accelerator.prepare(*parts())
    losses = []
    for loaded_batch in batches:
        losses.append(loss_of(model, loaded_batch))
        accelerator.backward(losses[-1])
        optimizer.step()
        optimizer.zero_grad()
    see("losses", losses)
    see("dtypes", sorted(set(accelerator.unwrap_model(model).seen)))


@observe("state")
def placement_is_left_to_the_script(see: Seen) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(device_placement=False)
    model, _optimizer, batches, _ = accelerator.prepare(*parts())
    see("model", next(model.parameters()).device)
    see("batches", [batch["x"].device for batch in batches])
    see("loader", lambda: batches.device)
    placing_accelerator = Accelerator()
    training_parts = parts()
    moved = placing_accelerator.prepare(
        training_parts[0], training_parts[1], device_placement=[False, True]
    )
    see("chosen", next(moved[0].parameters()).device)
    see(
        "wrong number",
        lambda: placing_accelerator.prepare(*parts()[:2], device_placement=[True]),
    )
    see(
        "by hand",
        lambda: (
            next(
                placing_accelerator.prepare_model(
                    Net(), device_placement=False
                ).parameters()
            ).device
        ),
    )
    see(
        "moved",
        lambda: next(placing_accelerator.prepare_model(Net()).parameters()).device,
    )
    see(
        "evaluation",
        lambda: type(placing_accelerator.prepare_model(Net(), evaluation_mode=True)),
    )
    see(
        "again",
        lambda: (
            placing_accelerator.prepare_model(training_parts[0]) is training_parts[0]
        ),
    )


@observe("state")
def prepared_objects(see: Seen) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    training_parts = parts()
    model, optimizer, batches, scheduler = accelerator.prepare(*training_parts)
    see(
        "types", [type(prepared) for prepared in (model, optimizer, batches, scheduler)]
    )
    see("same model", model is training_parts[0])
    see("inner optimizer", optimizer.optimizer is training_parts[1])
    see("parameters", [parameter.device for parameter in model.parameters()])
    see(
        "group", [parameter.device for parameter in optimizer.param_groups[0]["params"]]
    )
    see(
        "known",
        [
            len(accelerator._models),
            len(accelerator._optimizers),
            len(accelerator._dataloaders),
        ],
    )
    see("strangers", lambda: accelerator.prepare(3, "text", None))
    see("tensor", lambda: accelerator.prepare(torch.ones(2)))
    see("buffers", [buffer.device for buffer in model.buffers()])
    see("device map", lambda: accelerator.verify_device_map(model))
    see("free", accelerator.free_memory(model, optimizer))
    see(
        "known after",
        [
            len(accelerator._models),
            len(accelerator._optimizers),
            len(accelerator._dataloaders),
        ],
    )


@observe("state")
def a_model_with_a_device_map(see: Seen) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = Net()
    model.hf_device_map = {"first": 0, "norm": "cpu", "last": "disk"}
    see("cpu and disk", lambda: type(accelerator.prepare(model)))
    model.hf_device_map = {"": 0}
    see("one device", lambda: next(accelerator.prepare(model).parameters()).device)
    model.hf_device_map = {"first": 0, "last": 1}
    see("two devices", lambda: type(accelerator.prepare(model)))
    see("verified", lambda: accelerator.verify_device_map(model))
    quantized_model = Net()
    quantized_model.is_loaded_in_8bit = True
    quantized_model.hf_device_map = {"": "cpu"}
    see("8 bit", lambda: type(accelerator.prepare(quantized_model)))


@observe("state")
def decorators_and_blocks(see: Seen) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    for name in ("on_main_process", "on_local_main_process", "on_last_process"):
        see(name, lambda name=name: getattr(accelerator, name)(lambda: 3)())
    see("on_process", lambda: accelerator.on_process(lambda: 4, process_index=0)())
    see(
        "on_local_process",
        lambda: accelerator.on_local_process(lambda: 4, local_process_index=0)(),
    )
    see("waits", lambda: accelerator.wait_for_everyone())
    see(
        "trigger",
        lambda: (
            accelerator.set_trigger(),
            accelerator.check_trigger(),
            accelerator.check_trigger(),
        ),
    )
    see("print", lambda: accelerator.print("a line"))
    with accelerator.split_between_processes([1, 2, 3]) as process_share:
        see("list", process_share)
    with accelerator.split_between_processes(
        torch.arange(3, device=DEVICE), apply_padding=True
    ) as process_share:
        see("tensor", process_share)
    with accelerator.split_between_processes(
        {"a": [1, 2], "b": torch.ones(2, device=DEVICE)}
    ) as process_share:
        see("dict", process_share)
    with accelerator.main_process_first():
        see("first", True)
    with accelerator.join_uneven_inputs([Net()]):
        see("joined", True)


# -- operations ------------------------------------------------------------------------------------------------------
Pair = namedtuple("Pair", ["a", "b"])


class Movable:
    """Has a `to` of its own."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def to(self, *arguments: Any, **options: Any) -> Movable:
        self.asked.append([str(argument) for argument in arguments] + sorted(options))
        return self


class OnlyDevice(Movable):
    """Has a `to` without options."""

    def to(self, device: Any) -> OnlyDevice:
        self.asked.append(str(device))
        return self


@observe("operations")
def sending_to_the_device(see: Seen) -> None:
    from accelerate.utils import send_to_device

    x = torch.ones(2)
    for name, value in (
        ("tensor", x),
        ("list", [x, x]),
        ("tuple", (x, 3, "text", None)),
        ("named", Pair(x, [x])),
        ("dict", {"a": x, "b": {"c": [x]}}),
        ("ordered", OrderedDict(a=x)),
        ("integer", torch.arange(3)),
        ("half", x.half()),
        ("set", {1, 2}),
        ("number", 5),
        ("module", nn.Linear(1, 1)),
    ):
        see(name, lambda value=value: send_to_device(value, DEVICE))
        see(
            f"{name}, ahead",
            lambda value=value: send_to_device(
                value, torch.device(DEVICE), non_blocking=True
            ),
        )
    see("skipped", lambda: send_to_device({"a": x, "b": x}, DEVICE, skip_keys=["a"]))
    see(
        "skipped one",
        lambda: send_to_device({"a": x, "b": {"a": x}}, DEVICE, skip_keys="a"),
    )
    see("index", lambda: send_to_device(x, 0))
    see("same", lambda: send_to_device(batch(), DEVICE).device)
    movable, only = Movable(), OnlyDevice()
    see("movable", lambda: send_to_device([movable, only], DEVICE, non_blocking=True))
    see("asked", [movable.asked, only.asked])
    see(
        "pinned",
        lambda: send_to_device(
            x.pin_memory() if CUDA else x, DEVICE, non_blocking=True
        ),
    )
    see(
        "shared",
        lambda: (lambda pair: pair[0] is pair[1])(send_to_device([x, x], DEVICE)),
    )


@observe("operations")
def looking_at_tensors(see: Seen) -> None:
    import accelerate.utils as tools

    x = {"a": batch(), "b": [torch.arange(4, device=DEVICE)]}
    for name in (
        "find_batch_size",
        "find_device",
        "get_data_structure",
        "listify",
        "convert_to_fp32",
    ):
        see(name, lambda name=name: getattr(tools, name)(x))
    see(
        "half",
        lambda: tools.convert_to_fp32(
            {
                "a": batch().half(),
                "b": batch().bfloat16(),
                "c": torch.arange(3, device=DEVICE),
            }
        ),
    )
    see(
        "outputs",
        lambda: tools.convert_outputs_to_fp32(lambda value: value.half())(batch()),
    )
    see("sliced", lambda: tools.slice_tensors(x, slice(0, 2)))
    see("joined", lambda: tools.concatenate([x, x]))
    see("made", lambda: tools.initialize_tensors(tools.get_data_structure(x)).keys())
    see("bf16", lambda: tools.listify(batch().bfloat16()))
    see("no device", lambda: tools.find_device([1, "a"]))
    see("no batch", lambda: tools.find_batch_size([1]))
    see("applied", lambda: tools.recursively_apply(lambda tensor: tensor * 2, x))
    see(
        "strict",
        lambda: tools.recursively_apply(
            lambda tensor: tensor, {"a": 3}, error_on_other_type=True
        ),
    )
    see("ignorant", lambda: tools.ignorant_find_batch_size([1]))


@observe("operations")
def collectives_of_one_process(see: Seen) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    x = batch()
    for name, value in (
        ("tensor", x),
        ("scalar", x.sum()),
        ("nested", {"a": [x]}),
        ("host", x.cpu()),
        ("flags", x > 0),
    ):
        see(f"gather {name}", lambda value=value: accelerator.gather(value))
        see(
            f"metrics {name}", lambda value=value: accelerator.gather_for_metrics(value)
        )
        for reduction in ("sum", "mean", "none"):
            see(
                f"reduce {name}, {reduction}",
                lambda value=value, reduction=reduction: accelerator.reduce(
                    value, reduction=reduction
                ),
            )
        see(
            f"pad {name}",
            lambda value=value: accelerator.pad_across_processes(
                value, dim=1, pad_index=7
            ),
        )
        see(
            f"pad first {name}",
            lambda value=value: accelerator.pad_across_processes(value, pad_first=True),
        )
    see("same", accelerator.gather(x) is x)
    see("reduce half", lambda: accelerator.reduce(x.half(), "mean", scale=2.0))
    see("gather object", lambda: accelerator.gather_for_metrics(["a", "b"]))
    see(
        "use object",
        lambda: accelerator.gather_for_metrics([{"a": 1}], use_gather_object=True),
    )
    see("number", lambda: accelerator.gather(3))
    see("number reduced", lambda: accelerator.reduce(3))


@observe("operations")
def collectives_as_functions(see: Seen) -> None:
    import accelerate.utils as tools
    from accelerate import PartialState

    PartialState()
    x = batch()
    see("gather", lambda: tools.gather(x))
    see("gather_object", lambda: tools.gather_object([1, {"a": x.cpu()}]))
    see("broadcast", lambda: tools.broadcast({"a": x}))
    see("broadcast_object_list", lambda: tools.broadcast_object_list([1, "a"]))
    see("reduce", lambda: tools.reduce({"a": x}, "mean"))
    see("pad", lambda: tools.pad_across_processes([x], dim=1))
    see("pad inputs", lambda: tools.pad_input_tensors(x[:3], 3, 2))
    see("copied", lambda: tools.copy_tensor_to_devices(x))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).to(DEVICE)
    see("nested", lambda: tools.pad_across_processes(nested))


@observe("operations")
def operations_under_debug(see: Seen) -> None:
    os.environ["ACCELERATE_DEBUG_MODE"] = "1"
    from accelerate import Accelerator

    accelerator = Accelerator()
    see("debug", accelerator.state.debug)
    see("gather", lambda: accelerator.gather(batch()))
    see("gather on the host", lambda: accelerator.gather(torch.ones(2)))
    see("reduce", lambda: accelerator.reduce(batch()))
    see("pad", lambda: accelerator.pad_across_processes(batch()))


@observe("operations")
def random_states(see: Seen) -> None:
    from accelerate import PartialState
    from accelerate.utils import set_seed, synchronize_rng_state, synchronize_rng_states
    from accelerate.utils.random import RNGType

    PartialState()
    set_seed(7)
    see("host", torch.rand(3))
    see("device", torch.rand(3, device=DEVICE))
    set_seed(7, device_specific=True)
    see("specific", torch.rand(3, device=DEVICE))
    set_seed(7, deterministic=True)
    see("deterministic", torch.are_deterministic_algorithms_enabled())
    torch.use_deterministic_algorithms(False)
    see("workspace", os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
    for kind in ("torch", "cuda", "xpu", "generator"):
        see(kind, lambda kind=kind: synchronize_rng_state(RNGType(kind)))
    see("several", lambda: synchronize_rng_states(["torch", "cuda"]))
    see("unknown", lambda: synchronize_rng_states(["dice"]))
    see("after", torch.rand(2, device=DEVICE))


# -- loaders ---------------------------------------------------------------------------------------------------------
def _walk(see: Seen, name: str, batches: Any) -> None:
    from accelerate.state import GradientState

    rows = []
    for loaded_batch in batches:
        state = GradientState()
        first = loaded_batch["x"] if isinstance(loaded_batch, dict) else loaded_batch
        rows.append(
            [
                first.device,
                list(first.shape),
                float(first.double().sum()),
                state.end_of_dataloader,
                state.remainder,
            ]
        )
    see(name, rows)


@observe("data")
def loaders_on_the_device(see: Seen) -> None:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderAdapter, DataLoaderStateMixin

    accelerator = Accelerator()
    for name, source_loader in (
        ("plain", loader()),
        ("short last", loader(14)),
        ("dropped last", loader(14, drop_last=True)),
        ("shuffled", loader(shuffle=True)),
        ("seeded", loader(shuffle=True, generator=torch.Generator().manual_seed(3))),
        ("workers", loader(num_workers=2)),
        ("pinned", loader(pin_memory=CUDA)),
        (
            "workers, pinned",
            loader(num_workers=1, pin_memory=CUDA, persistent_workers=True),
        ),
        ("rows", torch.utils.data.DataLoader(dataset(4), batch_size=None)),
        ("tensors", torch.utils.data.DataLoader(torch.arange(12.0), batch_size=5)),
    ):
        torch.manual_seed(4)
        prepared = accelerator.prepare(source_loader)
        _walk(see, name, prepared)
        _walk(see, f"{name}, again", prepared)
        names = (
            "device",
            "batch_size",
            "num_workers",
            "pin_memory",
            "drop_last",
            "total_batch_size",
            "total_dataset_length",
        )
        attributes(
            see,
            name,
            prepared,
            (
                *names,
                "sampler",
                "batch_sampler",
                "synchronized_generator",
                "rng_types",
                "iteration",
            ),
        )
        kinds = (DataLoaderAdapter, DataLoaderStateMixin, torch.utils.data.DataLoader)
        see(
            f"{name}, class",
            [
                type(prepared).__name__,
                len(prepared),
                [isinstance(prepared, kind) for kind in kinds],
            ],
        )


@observe("data")
def generators_on_the_device(see: Seen) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(
        rng_types=["torch", *(["cuda"] if CUDA else []), "generator"]
    )
    torch.manual_seed(4)
    prepared = accelerator.prepare(loader(shuffle=True))
    _walk(see, "types", prepared)
    see("rng types", accelerator.rng_types)
    see("device after", torch.rand(2, device=DEVICE))
    see("host after", torch.rand(2))
    with_generator = lambda: accelerator.prepare(  # noqa: E731
        loader(shuffle=True, generator=torch.Generator(DEVICE))
    )
    see("generator there", lambda: [batch["x"].sum() for batch in with_generator()])


def _configured(see: Seen, name: str, rows: int = 14, **options: Any) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    torch.manual_seed(4)

    def walked() -> None:
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
        prepared = accelerator.prepare(loader(rows, shuffle=True, pin_memory=CUDA))
        see(
            f"{name}, class",
            [type(prepared).__name__, len(prepared), type(prepared.sampler).__name__],
        )
        _walk(see, name, prepared)
        _walk(see, f"{name}, again", prepared)

    see(f"{name}, ended", walked)


@observe("data")
def loaders_by_configuration(see: Seen) -> None:
    _configured(see, "seedable", use_seedable_sampler=True)
    _configured(see, "data seed", use_seedable_sampler=True, data_seed=9)
    _configured(see, "non blocking", non_blocking=True)
    _configured(see, "dispatched", dispatch_batches=True)
    _configured(see, "split", split_batches=True)
    _configured(see, "uneven", even_batches=False)
    _configured(see, "stateful", use_stateful_dataloader=True)


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Rows one after the other, which tells what was read."""

    def __init__(self, rows: list[dict[str, Tensor]]) -> None:
        self.rows, self.read = rows, 0

    def __iter__(self) -> Any:
        for row in self.rows:
            self.read += 1
            yield row


@observe("data")
def streams(see: Seen) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState

    for dispatch in (None, True, False):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(
            dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch)
        )
        stream = Stream(dataset(10))
        prepared = accelerator.prepare(
            torch.utils.data.DataLoader(stream, batch_size=4)
        )
        see(f"{dispatch}, class", type(prepared))
        see(f"{dispatch}, length", lambda prepared=prepared: len(prepared))
        read = []
        for loaded_batch in prepared:
            read.append(
                [stream.read, loaded_batch["x"].device, list(loaded_batch["x"].shape)]
            )
        see(f"{dispatch}, read", read)


class Large(torch.utils.data.Dataset[Tensor]):
    """Rows of which a batch is larger than 64 KiB, and what was read."""

    def __init__(self, rows: int = 12, width: int = 8192) -> None:
        self.rows, self.width, self.read = rows, width, [-1]

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        return torch.full((self.width,), float(index))


@observe("data")
def large_batches(see: Seen) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState

    for name, pinned, ahead in (
        ("plain", False, False),
        ("pinned", CUDA, False),
        ("pinned, non blocking", CUDA, True),
    ):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(
            dataloader_config=DataLoaderConfiguration(non_blocking=ahead)
        )
        data = Large()
        prepared = accelerator.prepare(
            torch.utils.data.DataLoader(data, batch_size=4, pin_memory=pinned)
        )
        rows, kept_batches = [], []
        for loaded_batch in prepared:
            rows.append(
                [max(data.read), loaded_batch.device, loaded_batch[:, 0].tolist()]
            )
            loaded_batch.add_(1)  # batches belong to the loop
            kept_batches.append(loaded_batch)
        see(name, rows)
        see(f"{name}, kept", [loaded_batch.mean() for loaded_batch in kept_batches])
        for loaded_batch in prepared:
            see(f"{name}, left early", [max(data.read), loaded_batch.device])
            break
        see(f"{name}, next epoch", [loaded_batch[0, 0] for loaded_batch in prepared])


@observe("data")
def batches_of_many_forms(see: Seen) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    data = [
        (torch.ones(3) * index, {"name": f"row {index}"}, index) for index in range(4)
    ]
    prepared = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=2))
    see("default", list(prepared))
    strings = accelerator.prepare(
        torch.utils.data.DataLoader(["a", "b", "c"], batch_size=2)
    )
    see("strings", lambda: list(strings))
    named_loader = accelerator.prepare(
        torch.utils.data.DataLoader(
            data, batch_size=2, collate_fn=lambda rows: Pair(rows[0][0], rows[1][0])
        )
    )
    see("named", list(named_loader))
    movable = accelerator.prepare(
        torch.utils.data.DataLoader([1, 2], collate_fn=lambda _: Movable())
    )
    see("movable", lambda: [batch.asked for batch in movable])
    host = accelerator.prepare_data_loader(loader(), device_placement=False)
    see("on the host", [batch["x"].device for batch in host])


@observe("data")
def loaders_made_by_hand(see: Seen) -> None:
    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader, skip_first_batches

    accelerator = Accelerator()
    for name, options in (
        ("no device", {}),
        ("device", {"device": torch.device(DEVICE)}),
        ("not put", {"device": torch.device(DEVICE), "put_on_device": False}),
        (
            "two processes",
            {
                "device": torch.device(DEVICE),
                "put_on_device": True,
                "num_processes": 2,
                "process_index": 1,
            },
        ),
        ("uneven", {"num_processes": 2, "process_index": 1, "even_batches": False}),
        (
            "non blocking",
            {
                "device": torch.device(DEVICE),
                "put_on_device": True,
                "non_blocking": True,
            },
        ),
        (
            "generator",
            {
                "device": torch.device(DEVICE),
                "put_on_device": True,
                "rng_types": ["torch", "cuda"] if CUDA else ["torch"],
            },
        ),
    ):
        _walk(see, name, prepare_data_loader(loader(14), **options))
    prepared = accelerator.prepare(loader())
    _walk(see, "skipped", skip_first_batches(prepared, 2))
    _walk(see, "skipped by it", accelerator.skip_first_batches(prepared, 1))
    _walk(see, "skipped plain", skip_first_batches(loader(), 1))
    pairs = [
        (a["x"].sum(), b["x"].sum())
        for a, b in itertools.islice(
            zip(prepared, accelerator.prepare(loader(8)), strict=False), 2
        )
    ]
    see("side by side", pairs)
    see(
        "metrics",
        [
            accelerator.gather_for_metrics(batch["y"])
            for batch in accelerator.prepare(loader(14))
        ],
    )
    see("epoch", lambda: (prepared.set_epoch(3), prepared.iteration))


# -- one process of torchrun -------------------------------------------------------------------------------------------
@observe("launched", cuda=True)
def attributes_under_torchrun(see: Seen) -> None:
    from accelerate import Accelerator, PartialState

    accelerator = Accelerator()
    attributes(see, "it", accelerator, ATTRIBUTES)
    attributes(see, "state", PartialState(), STATE)
    see(
        "group",
        [
            torch.distributed.is_initialized(),
            torch.distributed.is_initialized() and torch.distributed.get_backend(),
        ],
    )
    see("repr", repr(accelerator.state).splitlines())


def _launched(see: Seen, handlers: list[Any], steps: int = 1, **options: Any) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(
        kwargs_handlers=handlers, gradient_accumulation_steps=steps, **options
    )
    model, optimizer, batches, scheduler = accelerator.prepare(*parts())
    see(
        "types", [type(prepared) for prepared in (model, optimizer, batches, scheduler)]
    )
    losses, norms, synced = [], [], []
    for loaded_batch in batches:
        with accelerator.accumulate(model):
            loss = loss_of(model, loaded_batch)
            accelerator.backward(loss)
            synced.append(accelerator.sync_gradients)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss)
    see("losses", losses)
    see("norms", [float(norm) for norm in norms])
    see("synced", synced)
    see("weights", checksum(model))
    see("rate", scheduler.get_last_lr())
    see(
        "unwrapped",
        [
            type(accelerator.unwrap_model(model)),
            sorted(accelerator.unwrap_model(model).state_dict()),
        ],
    )
    see("state dict", sorted(accelerator.get_state_dict(model)))
    see("own keys", sorted(model.state_dict()))
    see("saved", lambda: accelerator.save_state("state") and None)
    see("loaded", lambda: accelerator.load_state("state"))
    with accelerator.no_sync(model):
        see("no sync", getattr(model, "require_backward_grad_sync", "(nothing)"))


@observe("launched", cuda=True)
def training_under_torchrun(see: Seen) -> None:
    _launched(see, [])


@observe("launched", cuda=True)
def windows_under_torchrun(see: Seen) -> None:
    _launched(see, [], steps=3)


@observe("launched", cuda=True)
def fp16_under_torchrun(see: Seen) -> None:
    from accelerate import GradScalerKwargs

    _launched(see, [GradScalerKwargs(init_scale=256.0)], mixed_precision="fp16")


@observe("launched", cuda=True)
def options_of_ddp_under_torchrun(see: Seen) -> None:
    from accelerate import DistributedDataParallelKwargs

    options = DistributedDataParallelKwargs(
        find_unused_parameters=True,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )
    _launched(see, [options], mixed_precision="bf16")


@observe("launched", cuda=True)
def communication_hooks_under_torchrun(see: Seen) -> None:
    from accelerate import DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState
    from accelerate.utils import DDPCommunicationHookType

    for name in ("NO", "FP16", "BF16", "POWER_SGD", "BATCHED_POWER_SGD"):
        AcceleratorState._reset_state(True)
        hook = DDPCommunicationHookType[name]
        inner = Seen()
        see(
            name,
            lambda hook=hook, inner=inner: _launched(
                inner, [DistributedDataParallelKwargs(comm_hook=hook)]
            ),
        )
        for key in ("losses", "weights", "types", "ended"):
            see.values[f"{name}, {key}"] = inner.values.get(key)
    wrapper = DDPCommunicationHookType.FP16
    options = DistributedDataParallelKwargs(
        comm_hook=wrapper, comm_wrapper=DDPCommunicationHookType.NO
    )
    see("wrapper", lambda: _launched(Seen(), [options]))


@observe("launched", cuda=True)
def operations_under_torchrun(see: Seen) -> None:
    collectives_of_one_process(see)


@observe("launched", cuda=True)
def functions_under_torchrun(see: Seen) -> None:
    collectives_as_functions(see)


@observe("launched", cuda=True)
def blocks_under_torchrun(see: Seen) -> None:
    decorators_and_blocks(see)


@observe("launched", cuda=True)
def loaders_under_torchrun(see: Seen) -> None:
    loaders_on_the_device(see)


@observe("launched", cuda=True)
def configured_loaders_under_torchrun(see: Seen) -> None:
    loaders_by_configuration(see)


@observe("launched", cuda=True)
def streams_under_torchrun(see: Seen) -> None:
    streams(see)


@observe("launched", cuda=True)
def the_group_under_torchrun(see: Seen) -> None:
    from datetime import timedelta

    from accelerate import Accelerator, InitProcessGroupKwargs, PartialState

    accelerator = Accelerator(
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=90))]
    )
    see("device", accelerator.device)
    see("handler", lambda: accelerator.init_handler.backend)
    see("ends", lambda: accelerator.end_training())
    see("group after", torch.distributed.is_initialized())
    see("again", lambda: PartialState().distributed_type)
    PartialState._reset_state()
    see("cpu", lambda: PartialState(cpu=True).device)
    see("cpu kind", lambda: PartialState().distributed_type)


# -- shards in one process -------------------------------------------------------------------------------------------
def _sharded(see: Seen, plugin_options: dict[str, Any], **options: Any) -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **plugin_options)
    accelerator = Accelerator(fsdp_plugin=plugin, **options)
    see(
        "kind",
        [
            accelerator.distributed_type,
            accelerator.is_fsdp2,
            accelerator.mixed_precision,
            accelerator.device,
        ],
    )
    model, optimizer, batches, scheduler = accelerator.prepare(*parts())
    see(
        "class",
        [type(model).__name__, [base.__name__ for base in type(model).__mro__][1:3]],
    )
    see(
        "parameters",
        [
            [name, type(parameter).__name__, parameter.dtype, parameter.device]
            for name, parameter in model.named_parameters()
        ],
    )
    losses, norms = [], []
    for loaded_batch in batches:
        loss = loss_of(model, loaded_batch)
        accelerator.backward(loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    see("losses", losses)
    see("norms", [float(norm) for norm in norms])
    see("dtypes", sorted(set(accelerator.unwrap_model(model).seen)))
    full_state = accelerator.get_state_dict(model)
    see(
        "whole",
        {
            key: [
                type(tensor).__name__,
                tensor.dtype,
                tensor.device,
                list(tensor.shape),
            ]
            for key, tensor in full_state.items()
        },
    )
    see(
        "weights",
        float(sum(tensor.double().abs().sum() for tensor in full_state.values())),
    )
    see("saved", lambda: accelerator.save_state("state") and None)
    see("loaded", lambda: accelerator.load_state("state"))
    from observing import files_in

    see("files", lambda: files_in("state"))
    see(
        "plugin",
        [
            noted(getattr(plugin, name, "(nothing)"))
            for name in ("reshard_after_forward", "cpu_offload", "state_dict_type")
        ],
    )


@observe("sharded", limit=60, cuda=True)
def shards(see: Seen) -> None:
    _sharded(see, {})


@observe("sharded", limit=60, cuda=True)
def whole_checkpoints_of_shards(see: Seen) -> None:
    _sharded(see, {"state_dict_type": "FULL_STATE_DICT"})


@observe("sharded", limit=60, cuda=True)
def shards_in_bf16(see: Seen) -> None:
    _sharded(see, {"reshard_after_forward": False}, mixed_precision="bf16")


@observe("sharded", limit=60, cuda=True)
def shards_by_a_policy(see: Seen) -> None:
    _sharded(see, {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 20})


@observe("sharded", limit=60, cuda=True)
def shards_by_classes(see: Seen) -> None:
    _sharded(
        see,
        {
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_cls_names_to_wrap": ["Linear"],
        },
    )


@observe("sharded", limit=60, cuda=True)
def shards_on_the_host(see: Seen) -> None:
    _sharded(see, {"cpu_offload": True})


@observe("sharded", limit=60, cuda=True)
def shards_by_sizes(see: Seen) -> None:
    from accelerate import Accelerator, ParallelismConfig

    see(
        "one",
        lambda: (
            Accelerator(
                parallelism_config=ParallelismConfig(dp_shard_size=1)
            ).distributed_type
        ),
    )
