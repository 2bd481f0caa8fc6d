"""Loops on a device: precision and loss scales, windows, checkpoints, memory, profiles, compiled models, fp8."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from observing import (
    CUDA,
    DEVICE,
    Net,
    Seen,
    batch,
    checksum,
    files_in,
    loader,
    loss_of,
    noted,
    observe,
    parts,
)
from torch import Tensor, nn


def scaler_of(accelerator: Any) -> Any:
    """What a loss scaler tells of itself."""
    scaler = accelerator.scaler
    return (
        None
        if scaler is None
        else [
            type(scaler).__name__,
            scaler.is_enabled(),
            scaler.get_scale(),
            scaler.state_dict(),
        ]
    )


def _trained(
    see: Seen, precision: str | None, handlers: list[Any] | None = None, **options: Any
) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(
        mixed_precision=precision, kwargs_handlers=handlers or [], **options
    )
    model, optimizer, batches, scheduler = accelerator.prepare(*parts())
    losses, norms, outputs, skipped = [], [], [], []
    for loaded_batch in batches:
        out = model(loaded_batch["x"])
        outputs.append(out.dtype)
        loss = nn.functional.cross_entropy(out, loaded_batch["y"])
        accelerator.backward(loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        skipped.append(
            [accelerator.optimizer_step_was_skipped, optimizer.step_was_skipped]
        )
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss)
    see("losses", losses)
    see("norms", norms)
    see("outputs", outputs)
    see("skipped", skipped)
    see("computed", sorted(set(accelerator.unwrap_model(model).seen)))
    see(
        "weights",
        [checksum(model), *(parameter.dtype for parameter in model.parameters())],
    )
    see("scaler", scaler_of(accelerator))
    see(
        "scheduler",
        [
            scheduler.get_last_lr(),
            scheduler.scheduler.last_epoch,
            scheduler.scheduler._step_count,
        ],
    )
    see("rates", [group["lr"] for group in optimizer.param_groups])
    return accelerator, model, optimizer, scheduler


@observe("precision")
def training_in_float32(see: Seen) -> None:
    _trained(see, "no")


@observe("precision")
def training_in_bf16(see: Seen) -> None:
    _trained(see, "bf16")


@observe("precision", cuda=True)
def training_in_fp16(see: Seen) -> None:
    _trained(see, "fp16")


@observe("precision", cuda=True)
def training_in_fp16_with_a_scale(see: Seen) -> None:
    from accelerate import GradScalerKwargs

    _trained(
        see,
        "fp16",
        [GradScalerKwargs(init_scale=64.0, growth_interval=2, growth_factor=4.0)],
    )


@observe("precision", cuda=True)
def training_in_fp16_without_a_scaler(see: Seen) -> None:
    from accelerate import GradScalerKwargs

    _trained(see, "fp16", [GradScalerKwargs(enabled=False)])


@observe("precision")
def training_without_autocast(see: Seen) -> None:
    from accelerate.utils import AutocastKwargs

    _trained(see, "bf16", [AutocastKwargs(enabled=False)])


@observe("precision")
def training_without_the_cache(see: Seen) -> None:
    from accelerate.utils import AutocastKwargs

    _trained(see, "bf16", [AutocastKwargs(cache_enabled=False)])


@observe("precision")
def handlers_of_precision(see: Seen) -> None:
    from accelerate import Accelerator, GradScalerKwargs
    from accelerate.utils import AutocastKwargs

    see(
        "twice",
        lambda: Accelerator(kwargs_handlers=[GradScalerKwargs(), GradScalerKwargs()]),
    )
    see(
        "autocast twice",
        lambda: Accelerator(kwargs_handlers=[AutocastKwargs(), AutocastKwargs()]),
    )
    see("stranger", lambda: Accelerator(kwargs_handlers=[3]))
    see("unknown", lambda: Accelerator(mixed_precision="fp4"))
    see("scaler", GradScalerKwargs(init_scale=3.0).to_kwargs())
    see("autocast", AutocastKwargs(enabled=False).to_kwargs())
    see(
        "fp8 without a recipe",
        lambda: Accelerator(mixed_precision="fp8").state.mixed_precision,
    )


def _overflow(see: Seen, steps: int = 1, with_scheduler: bool = True) -> None:
    from accelerate import Accelerator, GradScalerKwargs

    accelerator = Accelerator(
        mixed_precision="fp16",
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
        gradient_accumulation_steps=steps,
    )
    model, optimizer, batches, scheduler = accelerator.prepare(*parts())
    rows = []
    for index, loaded_batch in enumerate(batches):
        with accelerator.accumulate(model):
            loss = loss_of(model, loaded_batch) * (
                float("inf") if index in (1, 2) else 1.0
            )
            accelerator.backward(loss)
            previous_checksum = checksum(model)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if with_scheduler:
                scheduler.step()
            optimizer.zero_grad()
            rows.append(
                [
                    accelerator.optimizer_step_was_skipped,
                    optimizer.step_was_skipped,
                    previous_checksum == checksum(model),
                    accelerator.scaler.get_scale(),
                    scheduler.get_last_lr(),
                    scheduler.scheduler.last_epoch,
                ]
            )
    see("steps", rows)
    see("weights", checksum(model))
    see("scaler", scaler_of(accelerator))


@observe("precision", cuda=True)
def an_overflow(see: Seen) -> None:
    _overflow(see)


@observe("precision", cuda=True)
def an_overflow_inside_a_window(see: Seen) -> None:
    _overflow(see, steps=2)


@observe("precision", cuda=True)
def an_overflow_without_a_scheduler(see: Seen) -> None:
    _overflow(see, with_scheduler=False)


@observe("precision", cuda=True)
def an_overflow_of_one_of_two_optimizers(see: Seen) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="fp16")
    first, second = Net(), Net()
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)
    ]
    first, second, *ready = accelerator.prepare(first, second, *optimizers)
    x = batch()
    accelerator.backward(first(x).sum() * float("inf"))
    accelerator.backward(second(x).sum())
    for optimizer in ready:
        optimizer.step()
        see(
            f"skipped {len(see.values)}",
            [optimizer.step_was_skipped, accelerator.optimizer_step_was_skipped],
        )
    see("scale", accelerator.scaler.get_scale())


@observe("precision")
def outputs_in_float32(see: Seen) -> None:
    from accelerate import Accelerator

    class Forms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 2)

        def forward(self, x: Tensor, form: str) -> Any:
            out = self.layer(x)
            forms: dict[str, Any] = {
                "tensor": out, "tuple": (out, 1), "list": [out, None], "dict": {"a": out, "b": "text"}, "nested": ({"a": [out]},),
                "integers": torch.arange(2, device=x.device), "half": out.half(), "double": out.double(),
            }  # fmt: skip
            return forms[form]

    names = ("tensor", "tuple", "list", "dict", "nested", "integers", "half", "double")
    accelerator = Accelerator(mixed_precision="bf16")
    model = accelerator.prepare(Forms())
    for form in names:
        see(form, lambda form=form: model(batch(), form))
    see(
        "forward",
        [
            type(model.forward).__name__,
            hasattr(model.forward, "__wrapped__"),
            "forward" in model.__dict__,
        ],
    )
    see(
        "kept original",
        [hasattr(model, "_original_forward"), "_original_forward" in model.__dict__],
    )
    see("pickled", lambda: type(pickle.loads(pickle.dumps(accelerator.prepare(Net())))))
    unwrapped = accelerator.unwrap_model(model)
    see(
        "kept",
        [
            unwrapped is model,
            unwrapped(batch(), "tensor").dtype,
            "forward" in unwrapped.__dict__,
        ],
    )
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    see(
        "bare",
        [
            bare is model,
            bare(batch(), "tensor").dtype,
            "forward" in bare.__dict__,
            "_original_forward" in bare.__dict__,
        ],
    )
    see(
        "bare again",
        lambda: accelerator.unwrap_model(model, keep_fp32_wrapper=False) is bare,
    )
    see(
        "bare pickled",
        lambda: type(
            pickle.loads(
                pickle.dumps(
                    accelerator.unwrap_model(accelerator.prepare(Net()), False)
                )
            )
        ),
    )
    see("prepared again", lambda: accelerator.prepare(bare)(batch(), "tensor").dtype)


@observe("precision")
def autocast_blocks(see: Seen) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import AutocastKwargs

    layer = nn.Linear(8, 2).to(DEVICE)
    for precision in ("no", "bf16", *(["fp16"] if CUDA else [])):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(mixed_precision=precision)
        with accelerator.autocast():
            see(
                f"{precision}",
                [
                    layer(batch()).dtype,
                    torch.is_autocast_enabled(DEVICE),
                    torch.get_autocast_dtype(DEVICE),
                ],
            )
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            see(
                f"{precision}, off",
                [layer(batch()).dtype, torch.is_autocast_enabled(DEVICE)],
            )
        with accelerator.autocast(
            autocast_handler=AutocastKwargs(enabled=True, cache_enabled=False)
        ):
            see(
                f"{precision}, on",
                [layer(batch()).dtype, torch.is_autocast_cache_enabled()],
            )
        see(f"{precision}, after", torch.is_autocast_enabled(DEVICE))


@observe("precision", cuda=True)
def scaled_gradients(see: Seen) -> None:
    from accelerate import Accelerator, GradScalerKwargs

    accelerator = Accelerator(
        mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=128.0)]
    )
    model, optimizer, batches, _ = accelerator.prepare(*parts())
    batch = next(iter(batches))
    accelerator.backward(loss_of(model, batch))
    gradient = next(model.parameters()).grad
    assert gradient is not None
    see("scaled", gradient.clone())
    see("unscaled", lambda: (accelerator.unscale_gradients(), gradient.clone()))
    see("twice", lambda: (accelerator.unscale_gradients(), gradient.clone()))
    see("norm", lambda: accelerator.clip_grad_norm_(model.parameters(), 0.1))
    see(
        "norm again",
        lambda: accelerator.clip_grad_norm_(model.parameters(), 0.1, norm_type=1),
    )
    see("step", lambda: (optimizer.step(), accelerator.scaler.get_scale()))
    accelerator.backward(loss_of(model, batch))
    see("value", lambda: accelerator.clip_grad_value_(model.parameters(), 1e-3))
    see("clipped", gradient.abs().max())
    see("of one", lambda: accelerator.unscale_gradients(optimizer))
    see("scale", lambda: accelerator.scaler.scale(torch.ones(1, device=DEVICE)))


@observe("precision", cuda=True)
def weights_in_half(see: Seen) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="fp16")
    half_net = Net().half()
    model, optimizer = accelerator.prepare(
        half_net, torch.optim.SGD(half_net.parameters(), lr=0.1)
    )
    accelerator.backward(model(batch().half()).sum())
    see("norm", lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0))
    see("step", lambda: optimizer.step())
    see("output", lambda: model(batch().half()).dtype)


@observe("precision", cuda=True)
def batches_in_half(see: Seen) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    for kind in (torch.float16, torch.bfloat16):
        model = accelerator.prepare(Net().to(kind))
        see(f"{kind}", lambda model=model, kind=kind: model(batch().to(kind)))
        see(
            f"{kind}, backward",
            lambda model=model, kind=kind: accelerator.backward(
                model(batch().to(kind)).sum()
            ),
        )


@observe("precision")
def models_without_their_wrappers(see: Seen) -> None:
    from accelerate import Accelerator
    from accelerate.utils import extract_model_from_parallel, is_compiled_module

    accelerator = Accelerator(mixed_precision="bf16")
    net = Net()
    model = accelerator.prepare(net)
    see(
        "same",
        [
            extract_model_from_parallel(model) is net,
            accelerator.unwrap_model(model) is net,
        ],
    )
    see("compiled", is_compiled_module(model))
    see(
        "forward name",
        [
            model.forward.__name__
            if hasattr(model.forward, "__name__")
            else type(model.forward).__name__
        ],
    )
    see("bound", lambda: model.forward.__self__ is net)
    parallel = nn.DataParallel(Net().to(DEVICE)) if CUDA else nn.DataParallel(Net())
    see("parallel", type(extract_model_from_parallel(parallel)))
    see(
        "recursive",
        type(extract_model_from_parallel(nn.Sequential(parallel), recursive=True)),
    )


# -- windows -----------------------------------------------------------------------------------------------------------
def _windows(
    see: Seen,
    steps: Any,
    rows: int = 20,
    precision: str = "no",
    epochs: int = 2,
    **options: Any,
) -> None:
    from accelerate import Accelerator

    window_settings = (
        {"gradient_accumulation_steps": steps}
        if isinstance(steps, int)
        else {"gradient_accumulation_plugin": steps}
    )
    accelerator = Accelerator(mixed_precision=precision, **window_settings, **options)
    model, optimizer, batches, scheduler = accelerator.prepare(*parts(rows=rows))
    table = []
    for _ in range(epochs):
        for loaded_batch in batches:
            with accelerator.accumulate(model):
                loss = loss_of(model, loaded_batch)
                accelerator.backward(loss)
                norm = (
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                    if accelerator.sync_gradients
                    else None
                )
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            table.append(
                [
                    float(loss),
                    noted(norm),
                    accelerator.sync_gradients,
                    checksum(model),
                    scheduler.get_last_lr()[0],
                ]
            )
            table[-1].append(
                [
                    scheduler.scheduler.last_epoch,
                    scheduler.scheduler._step_count,
                    accelerator.step,
                ]
            )
    see("loop", table)
    see("weights", checksum(model))
    see("gradients", [parameter.grad is None for parameter in model.parameters()])
    see(
        "end",
        [
            accelerator.gradient_state.end_of_dataloader,
            accelerator.gradient_state.remainder,
            accelerator.sync_gradients,
        ],
    )


@observe("windows")
def windows_of_one(see: Seen) -> None:
    _windows(see, 1)


@observe("windows")
def windows_of_two(see: Seen) -> None:
    _windows(see, 2)


@observe("windows", cuda=True)
def windows_of_two_in_fp16(see: Seen) -> None:
    _windows(see, 2, precision="fp16")


@observe("windows")
def windows_of_three_in_bf16(see: Seen) -> None:
    _windows(see, 3, precision="bf16")


@observe("windows")
def windows_over_epochs(see: Seen) -> None:
    from accelerate.utils import GradientAccumulationPlugin

    _windows(see, GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False))


@observe("windows")
def windows_without_the_scheduler(see: Seen) -> None:
    from accelerate.utils import GradientAccumulationPlugin

    _windows(
        see,
        GradientAccumulationPlugin(
            num_steps=2, adjust_scheduler=False, sync_each_batch=True
        ),
    )


@observe("windows")
def windows_and_a_scheduler_of_its_own(see: Seen) -> None:
    _windows(see, 2, step_scheduler_with_optimizer=False)


@observe("windows")
def windows_by_hand(see: Seen) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, batches, _ = accelerator.prepare(*parts())
    rows = []
    for index, loop_batch in enumerate(batches):
        with accelerator.no_sync(model):
            accelerator.backward(loss_of(model, loop_batch))
        with accelerator.trigger_sync_in_backward(model):
            rows.append([accelerator.sync_gradients, index])
        see(
            f"norm {index}",
            lambda: accelerator.clip_grad_norm_(model.parameters(), 1e9),
        )
        optimizer.step()
        optimizer.zero_grad()
        rows.append(checksum(model))
    see("rows", rows)
    see("norm of nothing", lambda: accelerator.clip_grad_norm_([], 1.0))
    see("norm by value", lambda: accelerator.clip_grad_value_(model.parameters(), 0.1))
    see(
        "two losses",
        lambda: accelerator.backward(model(batch()).sum(), retain_graph=True),
    )
    see(
        "a parameter that is frozen",
        lambda: accelerator.backward(torch.ones(1, device=DEVICE)),
    )


# -- checkpoints -------------------------------------------------------------------------------------------------------
class Dropping(nn.Module):
    """A model that draws from the device's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(self.drop(x))
        return out


def _resumed(see: Seen, precision: str, **save_options: Any) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def start() -> Any:
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(mixed_precision=precision)
        torch.manual_seed(1)
        net = Dropping()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        ready = accelerator.prepare(net, optimizer, loader(32, shuffle=True), scheduler)
        accelerator.register_for_checkpointing(counter := Counter())
        return accelerator, *ready, counter

    def epoch(
        accelerator: Any,
        model: Any,
        optimizer: Any,
        batches: Any,
        scheduler: Any,
        counter: Counter,
    ) -> list[float]:
        losses = []
        for loaded_batch in batches:
            loss = loss_of(model, loaded_batch)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            counter.count += 1
            losses.append(float(loss))
        return losses

    run = start()
    see("first", epoch(*run))
    see("returned", run[0].save_state("state", **save_options))
    see("files", files_in("state"))
    see("next", epoch(*run))
    see("random", [torch.rand(2), torch.rand(2, device=DEVICE)])
    run = start()
    torch.rand(5, device=DEVICE)
    see("loaded", run[0].load_state("state"))
    see("resumed", epoch(*run))
    see("random again", [torch.rand(2), torch.rand(2, device=DEVICE)])
    see("counter", run[-1].count)
    see("scaler", scaler_of(run[0]))
    see("rate", run[4].get_last_lr())
    see("step", [run[0].save_iteration, run[0].step])
    for name in (
        "optimizer.bin",
        "scheduler.bin",
        "scaler.pt",
        "sampler.bin",
        "custom_checkpoint_0.pkl",
    ):
        see(
            name,
            lambda name=name: _shape(
                torch.load(Path("state") / name, weights_only=False)
            ),
        )
    states = torch.load("state/random_states_0.pkl", weights_only=False)
    see("random states", {key: type(value).__name__ for key, value in states.items()})
    see(
        "of the device",
        lambda: [
            [generator_state.dtype, generator_state.device, list(generator_state.shape)]
            for generator_state in states["torch_cuda_manual_seed"]
        ],
    )


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _shape(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_shape(child) for child in value]
    return (
        [str(value.dtype), str(value.device), list(value.shape)]
        if isinstance(value, Tensor)
        else noted(value)
    )


class Counter:
    """Something that is saved."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@observe("checkpoints")
def a_resumed_run(see: Seen) -> None:
    _resumed(see, "no")


@observe("checkpoints", cuda=True)
def a_resumed_run_in_fp16(see: Seen) -> None:
    _resumed(see, "fp16")


@observe("checkpoints")
def a_resumed_run_from_pickles(see: Seen) -> None:
    _resumed(see, "bf16", safe_serialization=False)


@observe("checkpoints")
def numbered_checkpoints(see: Seen) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    config = ProjectConfiguration(
        project_dir="run", automatic_checkpoint_naming=True, total_limit=2
    )
    accelerator = Accelerator(project_config=config)
    model, optimizer, *_ = accelerator.prepare(*parts())
    for _ in range(3):
        see(f"saved {accelerator.save_iteration}", accelerator.save_state())
        with torch.no_grad():
            next(model.parameters()).add_(1)
    see("files", files_in("run"))
    see("loaded", lambda: (accelerator.load_state(), checksum(model)))
    see(
        "loaded on the device",
        lambda: accelerator.load_state(
            "run/checkpoints/checkpoint_1", map_location="on_device"
        ),
    )
    see(
        "loaded on the host",
        lambda: accelerator.load_state(
            "run/checkpoints/checkpoint_1", map_location="cpu"
        ),
    )
    see(
        "wrong place",
        lambda: accelerator.load_state(
            "run/checkpoints/checkpoint_1", map_location="moon"
        ),
    )
    see("missing", lambda: accelerator.load_state("run/none"))
    see(
        "devices",
        [
            next(parameter.device for parameter in model.parameters()),
            *[str(value.device) for value in optimizer.state_dict()["state"]],
        ],
    )
    os.environ["ACCELERATE_USE_CPU"] = "0"


@observe("checkpoints")
def saved_models(see: Seen) -> None:
    from safetensors.torch import load_file

    from accelerate import Accelerator, load_checkpoint_in_model
    from accelerate.utils import load, save

    accelerator = Accelerator()
    model = accelerator.prepare(Net())
    for name, options in (
        ("whole", {}),
        ("shards", {"max_shard_size": "1KB"}),
        ("pickled", {"safe_serialization": False}),
    ):
        see(
            f"{name}, returned",
            lambda name=name, options=options: accelerator.save_model(
                model, name, **options
            ),
        )
        see(f"{name}, files", lambda name=name: files_in(name))
    see(
        "tensors",
        lambda: {
            key: [tensor.dtype, tensor.device]
            for key, tensor in load_file("whole/model.safetensors").items()
        },
    )
    see(
        "pickled",
        lambda: _shape(torch.load("pickled/pytorch_model.bin", weights_only=True)),
    )
    see(
        "index",
        lambda: json.loads(Path("shards/model.safetensors.index.json").read_text()),
    )
    see(
        "state dict",
        {
            key: [tensor.dtype, tensor.device]
            for key, tensor in accelerator.get_state_dict(model).items()
        },
    )
    see("not unwrapped", sorted(accelerator.get_state_dict(model, unwrap=False)))
    for name in ("whole", "shards", "pickled"):
        reloaded = Net()
        see(
            f"{name}, loaded",
            lambda name=name, reloaded=reloaded: (
                load_checkpoint_in_model(reloaded, name),
                checksum(reloaded) == checksum(model),
            ),
        )
        placed = Net().to("meta")
        see(
            f"{name}, placed",
            lambda name=name, placed=placed: (
                load_checkpoint_in_model(placed, name, device_map={"": GPU_OR_CPU}),
                placed(batch()).device,
            ),
        )
    accelerator.save({"a": batch(), "b": 3}, "object.pt")
    see("object", lambda: torch.load("object.pt"))
    see(
        "safe",
        lambda: (
            save({"a": batch()}, "object.safetensors", safe_serialization=True),
            load_file("object.safetensors"),
        ),
    )
    see("read", lambda: load("object.pt", map_location="cpu"))


GPU_OR_CPU: Any = 0 if CUDA else "cpu"


@observe("checkpoints")
def hooks_of_checkpoints(see: Seen) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    _model, _optimizer, *_ = accelerator.prepare(*parts())
    hook_calls: list[Any] = []

    def save_hook(models: Any, weights: Any, folder: str) -> None:
        hook_calls.append(
            [
                len(models),
                len(weights),
                [str(tensor.device) for tensor in list(weights[0].values())[:1]],
            ]
        )
        weights.pop()

    def load_hook(models: Any, folder: str) -> None:
        hook_calls.append([len(models), type(models[0]).__name__])
        models.pop()

    first, second = (
        accelerator.register_save_state_pre_hook(save_hook),
        accelerator.register_load_state_pre_hook(load_hook),
    )
    accelerator.save_state("state")
    see("files", files_in("state"))
    accelerator.load_state("state")
    first.remove()
    second.remove()
    accelerator.save_state("other")
    see("other", files_in("other"))
    see("seen", hook_calls)


# -- memory --------------------------------------------------------------------------------------------------------------
@observe("freed")
def freed_memory(see: Seen) -> None:
    from accelerate import Accelerator
    from accelerate.utils import release_memory
    from accelerate.utils.memory import clear_device_cache

    def held() -> int:
        return torch.cuda.memory_allocated() >> 20 if CUDA else 0

    accelerator = Accelerator()
    see("before", held())
    layer = nn.Linear(2048, 2048)
    model, optimizer, batches = accelerator.prepare(
        layer, torch.optim.SGD(layer.parameters(), lr=0.1), loader()
    )
    del layer
    see("prepared", held())
    model, optimizer, batches = accelerator.free_memory(model, optimizer, batches)
    see("freed", [held(), model, optimizer, batches])
    see(
        "lists",
        [
            len(accelerator._models),
            len(accelerator._optimizers),
            len(accelerator._dataloaders),
            accelerator.step,
        ],
    )
    model = accelerator.prepare(nn.Linear(2048, 2048))
    (model,) = accelerator.clear(model)
    see("cleared", [held(), model])
    x, y = torch.ones(1 << 20, device=DEVICE), torch.ones(1 << 20, device=DEVICE)
    see("tensors", held())
    x, y = release_memory(x, y)
    see("released", [held(), x, y])
    see("cache", lambda: clear_device_cache(garbage_collection=True))
    see("one", lambda: release_memory(torch.ones(2, device=DEVICE)))


@observe("freed", cuda=True)
def a_batch_size_that_fits(see: Seen) -> None:
    from accelerate.utils import find_executable_batch_size
    from accelerate.utils.memory import should_reduce_batch_size

    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(2 * 2**30 / total)
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=64)
    def run(batch_size: int, rows: str) -> Any:
        tried.append(batch_size)
        allocation = torch.empty(batch_size, 2**28, dtype=torch.uint8, device="cuda")
        return [batch_size, rows, list(allocation.shape)]

    see("found", lambda: run("rows"))
    see("tried", tried)
    see("wrong arguments", lambda: run(8, "rows"))

    @find_executable_batch_size(starting_batch_size=5, reduce_batch_size_fn=lambda: 2)
    def never(batch_size: int) -> None:
        torch.empty(2**34, dtype=torch.uint8, device="cuda")

    @find_executable_batch_size(starting_batch_size=2)
    def nothing(batch_size: int) -> None:
        torch.empty(2**34, dtype=torch.uint8, device="cuda")

    see("nothing", lambda: nothing())
    see("held", torch.cuda.memory_allocated() >> 20)
    try:
        torch.empty(2**34, dtype=torch.uint8, device="cuda")
    except RuntimeError as error:
        see("recognised", should_reduce_batch_size(error))
    for text in (
        "CUDA out of memory. Tried",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
        "DefaultCPUAllocator: can't allocate",
        "else",
    ):
        see(text, should_reduce_batch_size(RuntimeError(text)))
    torch.cuda.set_per_process_memory_fraction(1.0)


@observe("freed", cuda=True)
def kernels_for_memory(see: Seen) -> None:
    from accelerate.test_utils import testing

    for name in ("torch_device", "device_count"):
        see(name, lambda name=name: getattr(testing, name))
    allocation = torch.ones(1 << 20, device="cuda")
    see("held", lambda: testing.memory_allocated_func() >= allocation.nbytes)
    from accelerate.utils import get_max_memory

    see("given", lambda: get_max_memory({0: "1GB", "cpu": "2MiB"}))
    see("bytes", lambda: get_max_memory({0: 10, "cpu": 20, "disk": 30}))
    see("order", lambda: list(get_max_memory({"cpu": 3, 0: 5})))
    see("unknown", lambda: get_max_memory({1: 5}))
    see("text key", lambda: get_max_memory({"cuda:0": 5}))
    see("wrong", lambda: get_max_memory({0: "much"}))


@observe("memory", cuda=True)
def the_whole_memory(see: Seen) -> None:
    from accelerate.utils import get_balanced_memory, get_max_memory

    limits = get_max_memory()
    see("keys", list(limits))
    see("the device, in GB", round(limits[0] / 2**30))
    free, _total = torch.cuda.mem_get_info()
    see("share of what is free", round(limits[0] / free, 2))
    see("initialized", torch.cuda.is_initialized())
    see(
        "balanced",
        lambda: {
            key: round(value / 2**30)
            for key, value in get_balanced_memory(nn.Linear(2, 2)).items()
            if key == 0
        },
    )
    see("zero", lambda: list(get_balanced_memory(nn.Linear(2, 2), low_zero=True)))


# -- profiles and compiled models ----------------------------------------------------------------------------------------
def _profiled(see: Seen, **options: Any) -> None:
    from accelerate import Accelerator, ProfileKwargs

    handler = ProfileKwargs(**options)
    accelerator = Accelerator(kwargs_handlers=[handler])
    model = accelerator.prepare(Net())
    with accelerator.profile() as profile:
        for _ in range(6):
            model(batch()).sum().backward()
            profile.step()
    see("type", type(profile))
    see("activities", lambda: sorted(str(activity) for activity in profile.activities))
    see(
        "names",
        lambda: sorted(
            event.key
            for event in profile.key_averages()
            if event.key.startswith("aten::")
        )[:30],
    )
    see(
        "on the device",
        lambda: any(
            event.self_device_time_total > 0 for event in profile.key_averages()
        ),
    )
    see(
        "options",
        lambda: [
            profile.record_shapes,
            profile.with_stack,
            profile.with_flops,
            profile.profile_memory,
        ],
    )
    see("files", files_in("."))


@observe("profile")
def a_profile(see: Seen) -> None:
    _profiled(see)


@observe("profile")
def a_profile_of_activities(see: Seen) -> None:
    _profiled(
        see,
        activities=["cpu", "cuda"] if CUDA else ["cpu"],
        record_shapes=True,
        profile_memory=True,
    )


@observe("profile", cuda=True)
def a_profile_of_the_device(see: Seen) -> None:
    _profiled(see, activities=["cuda"])


@observe("profile")
def a_profile_in_a_folder(see: Seen) -> None:
    _profiled(see, output_trace_dir="traces", with_flops=True)


@observe("profile")
def a_profile_by_a_schedule(see: Seen) -> None:
    step_numbers: list[int] = []
    ready = lambda profile: step_numbers.append(profile.step_num)  # noqa: E731
    _profiled(
        see,
        schedule_option={
            "wait": 1,
            "warmup": 1,
            "active": 1,
            "repeat": 2,
            "skip_first": 0,
        },
        on_trace_ready=ready,
    )
    see("seen", step_numbers)


@observe("profile")
def wrong_profiles(see: Seen) -> None:
    from accelerate import Accelerator, ProfileKwargs

    see("activity", lambda: ProfileKwargs(activities=["gpu"]).build())
    see("schedule", lambda: ProfileKwargs(schedule_option={"wait": 1}).build())
    accelerator = Accelerator()
    with accelerator.profile(ProfileKwargs(activities=["cpu"])) as profile:
        accelerator.prepare(Net())(batch())
    see("given", lambda: sorted(str(activity) for activity in profile.activities))


def _plain() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _compiled(see: Seen, **options: Any) -> None:
    from accelerate import Accelerator
    from accelerate.utils import has_compiled_regions, is_compiled_module

    accelerator = Accelerator(**options)
    net = _plain()
    model, optimizer, batches = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), loader()
    )
    see("type", type(model))
    see("recognised", [is_compiled_module(model), has_compiled_regions(model)])
    losses = []
    for loop_batch in batches:
        loss = nn.functional.cross_entropy(model(loop_batch["x"]), loop_batch["y"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    see("losses", losses)
    see("keys", sorted(model.state_dict()))
    see("unwrapped", type(accelerator.unwrap_model(model)))
    see(
        "unwrapped, not compiled",
        type(accelerator.unwrap_model(model, keep_torch_compile=False)),
    )
    see("dict", sorted(accelerator.get_state_dict(model)))
    see("weights", checksum(model))
    see("saved", lambda: accelerator.save_state("state") and files_in("state"))
    see("saved model", lambda: accelerator.save_model(model, "model"))
    see("files", lambda: files_in("model"))
    see("loaded", lambda: accelerator.load_state("state"))
    see("evaluated", lambda: (model.eval(), model(batch())))
    plugin = accelerator.state.dynamo_plugin
    names = (
        "backend",
        "mode",
        "fullgraph",
        "dynamic",
        "options",
        "disable",
        "use_regional_compilation",
    )
    see("plugin", [getattr(plugin, name, "(nothing)") for name in names])
    see("kwargs", lambda: plugin.to_kwargs())


@observe("compile", limit=90)
def compiled_eagerly(see: Seen) -> None:
    _compiled(see, dynamo_backend="eager")


@observe("compile", limit=120)
def compiled_by_inductor(see: Seen) -> None:
    _compiled(see, dynamo_backend="inductor")


@observe("compile", limit=90)
def compiled_with_precision(see: Seen) -> None:
    _compiled(see, dynamo_backend="aot_eager", mixed_precision="bf16")


@observe("compile", limit=90)
def compiled_by_a_plugin(see: Seen) -> None:
    from accelerate.utils import TorchDynamoPlugin

    _compiled(
        see,
        dynamo_plugin=TorchDynamoPlugin(backend="eager", dynamic=False, fullgraph=True),
    )


@observe("compile", limit=90)
def compiled_by_region(see: Seen) -> None:
    from accelerate.utils import TorchDynamoPlugin

    _compiled(
        see,
        dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=True),
    )


@observe("compile", limit=90)
def regions(see: Seen) -> None:
    from accelerate import utils

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            out: Tensor = self.head(x)
            return out

    model = Stack().to(DEVICE)
    expected_output = model(batch())
    compiled = utils.compile_regions(model, backend="eager")
    see(
        "types",
        [
            type(compiled),
            *(type(block) for block in compiled.layers),
            type(compiled.head),
        ],
    )
    see("original", [type(block) for block in model.layers])
    see("equal", bool(torch.allclose(compiled(batch()), expected_output)))
    see(
        "recognised",
        [
            utils.has_compiled_regions(compiled),
            utils.is_compiled_module(compiled),
            utils.has_compiled_regions(model),
        ],
    )
    see("keys", sorted(compiled.state_dict()))
    see(
        "extracted",
        lambda: type(
            utils.extract_model_from_parallel(compiled, keep_torch_compile=False)
        ),
    )
    see(
        "in place",
        lambda: (
            utils.compile_regions(Stack().to(DEVICE), backend="eager")(batch()).shape
        ),
    )


# -- fp8 -----------------------------------------------------------------------------------------------------------------
def _wide() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)
    )


def _in_fp8(see: Seen, recipe: Any) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    see(
        "kind",
        [
            accelerator.mixed_precision,
            accelerator.fp8_backend,
            accelerator.fp8_enabled,
            accelerator.scaler,
        ],
    )
    net = _wide()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(net, optimizer)
    see("types", [type(layer) for layer in model])
    see(
        "dtypes",
        [
            [type(parameter).__name__, parameter.dtype, parameter.device]
            for parameter in model.parameters()
        ],
    )
    losses = []
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    for _ in range(3):
        out = model(x)
        loss = out.float().square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    see("output", out.dtype)
    see("losses", losses)
    see("keys", sorted(accelerator.get_state_dict(model)))
    see("recipe", lambda: type(accelerator.fp8_recipe_handler))


@observe("fp8", limit=90, cuda=True)
def fp8_by_torchao(see: Seen) -> None:
    from accelerate.utils import AORecipeKwargs

    _in_fp8(see, AORecipeKwargs())


@observe("fp8", limit=90, cuda=True)
def fp8_by_torchao_with_a_filter(see: Seen) -> None:
    from accelerate.utils import AORecipeKwargs

    _in_fp8(see, AORecipeKwargs(module_filter_func=lambda module, name: name == "2"))


@observe("fp8", limit=90)
def fp8_by_functions(see: Seen) -> None:
    from accelerate.utils import ao

    see(
        "filter",
        lambda: [
            ao.filter_first_and_last_linear_layers(layer, name, "0", "4")
            for name, layer in _wide().named_children()
        ],
    )
    see("first and last", lambda: ao.find_first_last_linear_layers(_wide()))
    see(
        "layers",
        lambda: [
            ao.filter_linear_layers(layer, name, ["0", "4"])
            for name, layer in _wide().named_children()
        ],
    )
    model = _wide().to(DEVICE)
    see("converted", lambda: ao.convert_model_to_fp8_ao(model))
    see("types", [type(layer) for layer in model])
    see("has layers", lambda: ao.has_ao_layers(model))


@observe("fp8")
def fp8_without_its_packages(see: Seen) -> None:
    from accelerate import Accelerator, utils
    from accelerate.state import AcceleratorState

    for name, make in (
        ("te", lambda: utils.FP8RecipeKwargs(backend="TE")),
        ("msamp", lambda: utils.FP8RecipeKwargs(backend="MSAMP")),
        ("unknown", lambda: utils.FP8RecipeKwargs(backend="XX")),
        ("te recipe", lambda: utils.TERecipeKwargs()),
        ("msamp recipe", lambda: utils.MSAMPRecipeKwargs()),
        ("ao", lambda: type(utils.AORecipeKwargs())),
    ):
        see(name, make)
        AcceleratorState._reset_state(True)
        see(
            f"{name}, accelerator",
            lambda make=make: (
                Accelerator(mixed_precision="fp8", kwargs_handlers=[make()]).fp8_backend
            ),
        )
    AcceleratorState._reset_state(True)
    see(
        "two",
        lambda: Accelerator(
            mixed_precision="fp8",
            kwargs_handlers=[utils.AORecipeKwargs(), utils.AORecipeKwargs()],
        ),
    )
    for name in (
        "is_transformer_engine_available",
        "is_msamp_available",
        "is_torchao_available",
        "is_fp8_available",
    ):
        see(name, lambda name=name: getattr(utils, name)())
