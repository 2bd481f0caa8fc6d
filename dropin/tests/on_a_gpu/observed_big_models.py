"""Models larger than the device: maps, dispatching, offloading, hooks, loading, clients with a map."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from observing import CUDA, DEVICE, GPU, Seen, files_in, noted, observe
from torch import Tensor, nn

VOCABULARY, WIDTH, DEPTH = 32, 16, 3


class Block(nn.Module):
    """Two layers, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.scale, Tensor)
        return x + self.scale * self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Blocks between an embedding and a head, which may be tied."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, scale: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out if scale is None else out * scale.to(out.device)


def model_of(tied: bool = False, seed: int = 3) -> Model:
    """A model with weights of one seed."""
    torch.manual_seed(seed)
    return Model(tied).eval()


def tokens() -> Tensor:
    """A prompt, on the host."""
    return torch.arange(10).reshape(2, 5)


def wanted(tied: bool = False) -> Tensor:
    """What the model answers when it lies on the device."""
    with torch.no_grad():
        out: Tensor = model_of(tied).to(DEVICE)(tokens().to(DEVICE))
    return out


def _hooks(model: nn.Module) -> dict[str, Any]:
    hooks_by_name = {}
    for name, submodule in model.named_modules():
        hook = getattr(submodule, "_hf_hook", None)
        if hook is not None:
            inner = [
                type(inner_hook).__name__ for inner_hook in getattr(hook, "hooks", ())
            ]
            execution = str(getattr(hook, "execution_device", "(nothing)"))
            hook_settings = [
                getattr(hook, key, "(nothing)")
                for key in (
                    "offload",
                    "io_same_device",
                    "offload_buffers",
                    "place_submodules",
                )
            ]
            hooks_by_name[name] = [
                type(hook).__name__,
                inner,
                execution,
                hook_settings,
                hasattr(submodule, "_old_forward"),
            ]
    return hooks_by_name


def _places(model: nn.Module) -> dict[str, str]:
    return {
        name: str(tensor.device)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


def _looked_at(see: Seen, model: nn.Module, tied: bool = False) -> None:
    """Note everything that a model on several devices shows."""
    for name, location in _places(model).items():
        see(f"place of {name}", location)
    for name, hook in _hooks(model).items():
        see(f"hook of {name or 'the model'}", hook)
    see("modules with hooks", sorted(_hooks(model)))
    see(
        "map",
        lambda: {str(key): str(value) for key, value in model.hf_device_map.items()},
    )
    with torch.no_grad():
        for name, prompt in (("host", tokens()), ("device", tokens().to(DEVICE))):
            see(f"answer to the {name}", lambda prompt=prompt: model(prompt).device)
            see(
                f"equal, {name}",
                lambda prompt=prompt: bool(
                    torch.equal(model(prompt).cpu(), wanted(tied).cpu())
                ),
            )
    see("by name", lambda: model(tokens=tokens(), scale=torch.ones(1)).device)
    see("places after", lambda: _places(model))
    see("answer", lambda: model(tokens()))
    see(
        "grad",
        lambda: [
            model(tokens()).requires_grad,
            all(tensor.requires_grad for tensor in model.parameters()),
        ],
    )
    state = model.state_dict()
    see("keys", sorted(state))
    see("rest on", {key: str(tensor.device) for key, tensor in state.items()})
    see("device of the first", lambda: next(model.parameters()).device)
    for name, move in (
        ("to the device", lambda: model.to(DEVICE)),
        ("cuda", lambda: model.cuda() if CUDA else model.to(0)),
        ("cpu", lambda: model.cpu()),
        ("half", lambda: type(model.half())),
        ("float", lambda: type(model.float())),
    ):
        see(
            name,
            move if name in ("half", "float") else (lambda move=move: type(move())),
        )
    see("places after the moves", lambda: _places(model))


def _removed(see: Seen, model: nn.Module) -> None:
    from accelerate.hooks import remove_hook_from_submodules

    see("removed", lambda: remove_hook_from_submodules(model))
    see("hooks left", lambda: _hooks(model))
    see("places without hooks", lambda: _places(model))
    see("map left", hasattr(model, "hf_device_map"))
    see(
        "again on the device",
        lambda: bool(torch.equal(model.to(DEVICE)(tokens().to(DEVICE)), wanted())),
    )


def _dispatched(
    see: Seen, device_map: dict[str, Any], tied: bool = False, **options: Any
) -> nn.Module | None:
    from accelerate import dispatch_model

    model = model_of(tied)
    try:
        model = dispatch_model(model, device_map, **options)
    except Exception as error:
        see("dispatched", error)
        return None
    _looked_at(see, model, tied)
    return model


MIXED = {
    "embed": GPU,
    "blocks.0": GPU,
    "blocks.1": "cpu",
    "blocks.2": "cpu",
    "norm": GPU,
    "head": GPU,
}
ON_DISK = {
    "embed": GPU,
    "blocks.0": "cpu",
    "blocks.1": "disk",
    "blocks.2": "disk",
    "norm": "cpu",
    "head": GPU,
}


@observe("dispatch")
def dispatched_to_one_device(see: Seen) -> None:
    _dispatched(see, {"": GPU})


@observe("dispatch")
def dispatched_to_one_device_by_force(see: Seen) -> None:
    _dispatched(see, {"": GPU}, force_hooks=True)


@observe("dispatch")
def dispatched_to_two_devices(see: Seen) -> None:
    model = _dispatched(see, MIXED)
    if model is not None:
        _removed(see, model)


@observe("dispatch")
def dispatched_to_two_devices_with_buffers(see: Seen) -> None:
    _dispatched(see, MIXED, offload_buffers=True)


@observe("dispatch")
def dispatched_to_a_disk(see: Seen) -> None:
    model = _dispatched(see, ON_DISK, offload_dir="disk")
    see("files", files_in("disk"))
    see("index", lambda: json.loads(Path("disk/index.json").read_text()))
    if model is not None:
        _removed(see, model)


@observe("dispatch")
def dispatched_to_a_disk_with_a_main_device(see: Seen) -> None:
    _dispatched(
        see,
        {"embed": "cpu", "blocks": "disk", "norm": "cpu", "head": "cpu"},
        offload_dir="disk",
        main_device=GPU,
    )


@observe("dispatch")
def dispatched_with_tied_weights(see: Seen) -> None:
    model = _dispatched(see, {**MIXED, "head": "cpu"}, tied=True)
    if model is not None:
        see("tied", lambda: model.head.weight is model.embed.weight)
        see(
            "pointers",
            lambda: model.head.weight.data_ptr() == model.embed.weight.data_ptr(),
        )


@observe("dispatch")
def dispatched_with_tied_weights_on_the_device(see: Seen) -> None:
    _dispatched(see, MIXED, tied=True)


@observe("dispatch")
def dispatched_with_a_state_dict(see: Seen) -> None:
    _dispatched(see, MIXED, state_dict=model_of().state_dict())


@observe("dispatch")
def dispatched_with_whole_blocks(see: Seen) -> None:
    _dispatched(see, {**MIXED, "blocks.1": "cpu"}, preload_module_classes=["Block"])


@observe("dispatch")
def dispatched_with_skipped_keys(see: Seen) -> None:
    _dispatched(see, MIXED, skip_keys=["scale"])


@observe("dispatch")
def wrong_maps(see: Seen) -> None:
    from accelerate import dispatch_model
    from accelerate.utils import check_device_map

    see(
        "incomplete",
        lambda: dispatch_model(model_of(), {"embed": GPU, "blocks": "cpu"}),
    )
    see("no folder", lambda: dispatch_model(model_of(), ON_DISK))
    see("checked", lambda: check_device_map(model_of(), {"embed": 0}))
    see("unknown device", lambda: dispatch_model(model_of(), {"": "moon"}))
    see("too many devices", lambda: dispatch_model(model_of(), {**MIXED, "head": 5}))
    see(
        "all on the disk",
        lambda: (
            dispatch_model(model_of(), {"": "disk"}, offload_dir="disk")(
                tokens()
            ).device
        ),
    )
    see(
        "all on the host",
        lambda: dispatch_model(model_of(), {"": "cpu"})(tokens()).device,
    )
    see(
        "text",
        lambda: next(dispatch_model(model_of(), {"": DEVICE}).parameters()).device,
    )
    see(
        "device",
        lambda: (
            next(
                dispatch_model(model_of(), {"": torch.device(DEVICE)}).parameters()
            ).device
        ),
    )


@observe("dispatch")
def copies_of_dispatched_models(see: Seen) -> None:
    from accelerate import dispatch_model

    model = dispatch_model(model_of(), MIXED)
    see("pickled", lambda: type(pickle.loads(pickle.dumps(model))))
    see(
        "state",
        lambda: sorted(key for key in model.__dict__ if not key.startswith("_")),
    )
    see("saved", lambda: torch.save(model.state_dict(), "model.bin"))
    see("repr", str(model).splitlines()[:3])
    see(
        "methods",
        [
            type(model.to).__name__,
            type(model.forward).__name__,
            model.forward.__class__.__name__,
        ],
    )
    see("again", lambda: dispatch_model(model, {"": GPU})(tokens()).device)
    see("places again", lambda: _places(model))


@observe("offload")
def offloaded_to_the_host(see: Seen) -> None:
    from accelerate import cpu_offload

    model = model_of()
    see("returned", cpu_offload(model, DEVICE) is model)
    _looked_at(see, model)
    _removed(see, model)


@observe("offload")
def offloaded_to_the_host_with_buffers(see: Seen) -> None:
    from accelerate import cpu_offload

    model = model_of(tied=True)
    cpu_offload(
        model,
        torch.device(DEVICE),
        offload_buffers=True,
        state_dict=model_of(tied=True).state_dict(),
    )
    _looked_at(see, model, tied=True)


@observe("offload")
def offloaded_to_the_host_by_blocks(see: Seen) -> None:
    from accelerate import cpu_offload

    model = model_of()
    cpu_offload(model, DEVICE, preload_module_classes=["Block"])
    _looked_at(see, model)


@observe("offload")
def offloaded_to_the_disk(see: Seen) -> None:
    from accelerate import disk_offload

    model = model_of()
    see("returned", disk_offload(model, "disk", DEVICE) is model)
    see("files", files_in("disk"))
    see("index", lambda: json.loads(Path("disk/index.json").read_text()))
    _looked_at(see, model)
    _removed(see, model)


@observe("offload")
def offloaded_to_the_disk_with_buffers(see: Seen) -> None:
    from accelerate import disk_offload

    model = model_of()
    disk_offload(model, "disk", DEVICE, offload_buffers=True)
    see("files", files_in("disk"))
    _looked_at(see, model)


@observe("offload")
def offloaded_without_a_device(see: Seen) -> None:
    from accelerate import cpu_offload, disk_offload

    see("host", lambda: cpu_offload(model_of())(tokens()).device)
    see("disk", lambda: disk_offload(model_of(), "disk")(tokens()).device)


@observe("offload")
def a_chain_of_hooks(see: Seen) -> None:
    from accelerate import cpu_offload_with_hook

    layers, hooks, hook = [], [], None
    for index in range(3):
        torch.manual_seed(index)
        layer, hook = cpu_offload_with_hook(nn.Linear(4, 4), DEVICE, hook)
        layers.append(layer)
        hooks.append(hook)

    def places() -> list[str]:
        return [str(layer.weight.device) for layer in layers]

    see("before", places())
    x = torch.ones(2, 4)
    for index, layer in enumerate(layers):
        x = layer(x)
        see(f"after {index}", [places(), str(x.device)])
    see("twice", lambda: (layers[2](x), places()))
    hooks[2].offload()
    see("offloaded", places())
    see(
        "types",
        [
            type(hooks[0]),
            type(layers[0]._hf_hook),
            noted(getattr(hooks[1].hook, "prev_module_hook", None)),
        ],
    )
    see("attributes", sorted(hooks[0].__dict__))
    see("execution", getattr(layers[0]._hf_hook, "execution_device", None))
    hooks[0].remove()
    see("removed", [hasattr(layers[0], "_hf_hook"), places()])
    see("without", lambda: layers[0](torch.ones(2, 4)).device)
    see("on the device", lambda: layers[0](torch.ones(2, 4).to(DEVICE)).device)
    see(
        "no device",
        lambda: cpu_offload_with_hook(nn.Linear(4, 4))[0](torch.ones(1, 4)).device,
    )
    see("moved", lambda: layers[1].to(DEVICE).weight.device)


@observe("offload")
def training_on_offloaded_models(see: Seen) -> None:
    from accelerate import cpu_offload, dispatch_model

    class Adapter(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base
            self.low = nn.Linear(WIDTH, 2, bias=False)
            self.high = nn.Linear(2, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base(x) + self.high(
                self.low(x.to(self.low.weight.device))
            ).to(x.device)
            return out

    for name in ("offloaded", "dispatched"):
        model = model_of()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model = (
            cpu_offload(model, DEVICE)
            if name == "offloaded"
            else dispatch_model(model, MIXED)
        )
        torch.manual_seed(9)
        adapter = Adapter(nn.Identity()).to(DEVICE)
        optimizer = torch.optim.SGD(adapter.parameters(), lr=0.1)
        losses = []

        def run(
            model: nn.Module = model,
            adapter: nn.Module = adapter,
            optimizer: Any = optimizer,
            losses: Any = losses,
        ) -> None:
            for _ in range(3):
                hidden = adapter(model.embed(tokens().to(DEVICE)))
                for block in model.blocks:
                    hidden = block(hidden)
                loss = model.head(hidden).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss))

        see(f"{name}, ran", run)
        see(f"{name}, losses", losses)
    offloaded_model = cpu_offload(model_of(), DEVICE)
    see("backward", lambda: offloaded_model(tokens()).sum().backward())
    see(
        "gradients",
        lambda: [
            parameter.grad is not None for parameter in offloaded_model.parameters()
        ],
    )


@observe("offload")
def aligned_modules(see: Seen) -> None:
    from accelerate import cpu_offload
    from accelerate.utils import align_module_device, has_offloaded_params

    model = cpu_offload(model_of(), DEVICE)
    layer = model.blocks[0].up
    see(
        "offloaded",
        [
            has_offloaded_params(layer),
            has_offloaded_params(model),
            has_offloaded_params(nn.Linear(1, 1)),
        ],
    )
    for name, execution_device in (("own", None), ("device", DEVICE), ("host", "cpu")):
        with align_module_device(layer, execution_device=execution_device):
            see(
                f"inside, {name}",
                [layer.weight.device, layer.bias.device, float(layer.weight.sum())],
            )
        see(f"after, {name}", layer.weight.device)

    def change() -> list[float]:
        with align_module_device(layer):
            layer.weight.data.fill_(2.0)
        with align_module_device(layer):
            return [float(layer.weight.mean()), float(layer.bias.sum())]

    see("changed", change)
    plain = nn.Linear(2, 2)
    with align_module_device(plain, execution_device=DEVICE):
        see("plain inside", plain.weight.device)
    see("plain after", plain.weight.device)


@observe("offload")
def offloaded_state_dicts(see: Seen) -> None:
    from safetensors.torch import load_file

    from accelerate import Accelerator, cpu_offload, dispatch_model
    from accelerate.utils.modeling import get_state_dict_offloaded_model

    for name, make in (
        ("host", lambda: cpu_offload(model_of(), DEVICE)),
        ("two devices", lambda: dispatch_model(model_of(), MIXED)),
        (
            "disk",
            lambda: dispatch_model(
                model_of(), ON_DISK, offload_dir=f"disk {len(see.values)}"
            ),
        ),
        ("tied", lambda: dispatch_model(model_of(True), MIXED)),
    ):
        model = make()
        see(
            f"{name}, whole",
            lambda model=model: {
                key: [tensor.device, tensor.double().sum()]
                for key, tensor in get_state_dict_offloaded_model(model).items()
            },
        )
        accelerator = Accelerator()
        see(
            f"{name}, saved",
            lambda model=model, name=name, accelerator=accelerator: (
                accelerator.save_model(model, f"saved {name}")
            ),
        )
        see(f"{name}, files", lambda name=name: files_in(f"saved {name}"))
        see(
            f"{name}, tensors",
            lambda name=name: {
                key: tensor.double().sum()
                for key, tensor in load_file(f"saved {name}/model.safetensors").items()
            },
        )
        see(
            f"{name}, shards",
            lambda model=model, name=name, accelerator=accelerator: (
                accelerator.save_model(model, f"shards {name}", max_shard_size="3KB"),
                files_in(f"shards {name}"),
            ),
        )
        see(
            f"{name}, state dict",
            lambda model=model, accelerator=accelerator: {
                key: str(tensor.device)
                for key, tensor in accelerator.get_state_dict(model).items()
            },
        )
        see(
            f"{name}, prepared",
            lambda model=model, accelerator=accelerator: type(
                accelerator.prepare(model)
            ),
        )


# -- hooks -----------------------------------------------------------------------------------------------------------------
@observe("hooks")
def aligning_hooks(see: Seen) -> None:
    from accelerate.hooks import (
        AlignDevicesHook,
        add_hook_to_module,
        remove_hook_from_module,
    )

    x = torch.ones(2, 4)
    for name, options in (
        ("device", {"execution_device": DEVICE}),
        ("index", {"execution_device": GPU}),
        ("same device", {"execution_device": DEVICE, "io_same_device": True}),
        ("offload", {"execution_device": DEVICE, "offload": True}),
        (
            "offload, same",
            {
                "execution_device": GPU,
                "offload": True,
                "io_same_device": True,
                "offload_buffers": True,
            },
        ),
        (
            "submodules",
            {"execution_device": DEVICE, "offload": True, "place_submodules": True},
        ),
        (
            "given weights",
            {
                "execution_device": DEVICE,
                "offload": True,
                "weights_map": {"weight": torch.ones(4, 4), "bias": torch.zeros(4)},
            },
        ),
        ("nothing", {}),
    ):
        torch.manual_seed(1)
        layer = nn.Linear(4, 4)
        hook = AlignDevicesHook(**options)
        see(f"{name}, repr", lambda hook=hook: repr(hook))
        see(
            f"{name}, added",
            lambda layer=layer, hook=hook: add_hook_to_module(layer, hook) is layer,
        )
        see(f"{name}, before", [layer.weight.device, layer.bias.device])
        see(f"{name}, answer", lambda layer=layer: layer(x))
        see(
            f"{name}, after",
            [
                layer.weight.device,
                hasattr(layer, "_old_forward"),
                hasattr(layer, "_hf_hook"),
            ],
        )
        see(
            f"{name}, removed",
            lambda layer=layer: remove_hook_from_module(layer) is layer,
        )
        see(
            f"{name}, left",
            [
                layer.weight.device,
                float(layer.weight.sum())
                if layer.weight.device.type != "meta"
                else None,
            ],
        )
        see(f"{name}, signature", lambda layer=layer: layer.forward.__name__)


@observe("hooks")
def hooks_of_blocks(see: Seen) -> None:
    from accelerate.hooks import (
        attach_align_device_hook,
        attach_align_device_hook_on_blocks,
        attach_execution_device_hook,
    )

    model = model_of()
    attach_execution_device_hook(model.to(DEVICE), GPU)
    see("execution", _hooks(model))
    see("execution, answer", lambda: model(tokens()))
    for buffers in (False, True):
        model = model_of()
        attach_align_device_hook(
            model, execution_device=DEVICE, offload=True, offload_buffers=buffers
        )
        see(f"aligned, {buffers}", _hooks(model))
        see(f"aligned, {buffers}, places", _places(model))
        see(
            f"aligned, {buffers}, answer",
            lambda model=model: model(tokens().to(DEVICE)),
        )
        see(f"aligned, {buffers}, after", _places(model))
    model = model_of()
    devices = {
        "embed": DEVICE,
        "blocks.0": DEVICE,
        "blocks.1": DEVICE,
        "blocks.2": "cpu",
        "norm": DEVICE,
        "head": DEVICE,
    }
    offload = {
        "embed": False,
        "blocks.0": True,
        "blocks.1": False,
        "blocks.2": False,
        "norm": False,
        "head": False,
    }
    see(
        "blocks",
        lambda: attach_align_device_hook_on_blocks(
            model, execution_device=devices, offload=offload
        ),
    )
    see("blocks, hooks", _hooks(model))
    see("blocks, places", _places(model))
    see("blocks, answer", lambda: model(tokens()))
    block_model = model_of()
    see(
        "whole",
        lambda: attach_align_device_hook_on_blocks(
            block_model, execution_device=GPU, offload=True
        ),
    )
    see("whole, hooks", _hooks(block_model))
    see("whole, answer", lambda: block_model(tokens()))


@observe("hooks")
def hooks_of_ones_own(see: Seen) -> None:
    from accelerate.hooks import (
        AlignDevicesHook,
        CpuOffload,
        ModelHook,
        SequentialHook,
        add_hook_to_module,
        remove_hook_from_module,
    )

    class Plus(ModelHook):
        def pre_forward(
            self, module: nn.Module, *arguments: Any, **options: Any
        ) -> Any:
            return (arguments[0] + 1, *arguments[1:]), options

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output * 2

    torch.manual_seed(1)
    layer = nn.Linear(4, 4).to(DEVICE)
    x = torch.ones(2, 4, device=DEVICE)
    plain = layer(x)
    add_hook_to_module(layer, Plus())
    see("one", layer(x))
    add_hook_to_module(layer, Plus(), append=True)
    see("two", [layer(x), type(layer._hf_hook)])
    add_hook_to_module(layer, AlignDevicesHook(GPU, io_same_device=True), append=True)
    see("three", [[type(hook).__name__ for hook in layer._hf_hook.hooks], layer(x)])
    remove_hook_from_module(layer)
    see("removed", bool(torch.equal(layer(x), plain)))
    add_hook_to_module(layer, SequentialHook(Plus(), Plus()))
    see("sequence", layer(x))
    see("replaced", [add_hook_to_module(layer, Plus()) is layer, layer(x)])
    offloaded_layer = nn.Linear(4, 4)
    add_hook_to_module(offloaded_layer, CpuOffload(DEVICE))
    see(
        "offload",
        [
            offloaded_layer.weight.device,
            offloaded_layer(torch.ones(1, 4)).device,
            offloaded_layer.weight.device,
        ],
    )
    see("grad", lambda: [layer(x.requires_grad_()).requires_grad])
    no_grad = Plus()
    no_grad.no_grad = True
    add_hook_to_module(layer, no_grad)
    see("no grad", layer(x).requires_grad)
    see(
        "recursive", lambda: remove_hook_from_module(nn.Sequential(layer), recurse=True)
    )
    see("gone", hasattr(layer, "_hf_hook"))


@observe("hooks")
def casting_layers(see: Seen) -> None:
    from accelerate.big_modeling import attach_layerwise_casting_hooks
    from accelerate.hooks import LayerwiseCastingHook

    for storage in (
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float16,
        torch.bfloat16,
    ):
        for compute in (torch.float32, torch.bfloat16):
            torch.manual_seed(2)
            model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to(
                DEVICE
            )
            name = f"{storage}, {compute}".replace("torch.", "")
            see(
                name,
                lambda model=model, storage=storage, compute=compute: (
                    attach_layerwise_casting_hooks(model, storage, compute)
                ),
            )
            see(
                f"{name}, dtypes", [parameter.dtype for parameter in model.parameters()]
            )
            x = torch.ones(2, 8, device=DEVICE, dtype=compute)
            see(f"{name}, answer", lambda model=model, x=x: model(x))
            see(f"{name}, after", [parameter.dtype for parameter in model.parameters()])
            see(f"{name}, ahead", lambda model=model, x=x: model(x.float()).dtype)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).to(DEVICE)
    options = {
        "skip_modules_pattern": ["0"],
        "skip_modules_classes": (nn.LayerNorm,),
        "non_blocking": True,
    }
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32, **options)
    see("skipped", [parameter.dtype for parameter in model.parameters()])
    see("hooks", _hooks(model))
    see(
        "hook",
        lambda: LayerwiseCastingHook(torch.float8_e4m3fn, torch.float32, True).__dict__,
    )


# -- maps ------------------------------------------------------------------------------------------------------------------
@observe("maps")
def maps_by_limits(see: Seen) -> None:
    from accelerate import infer_auto_device_map

    model_bytes = sum(parameter.numel() * 4 for parameter in model_of().parameters())
    for name, limits in (
        ("half", {0: model_bytes // 2, "cpu": model_bytes}),
        ("bytes", {0: 4000, "cpu": 6000, "disk": 10**6}),
        ("text", {0: "5KB", "cpu": "1MB"}),
        ("binary text", {0: "5KiB", "cpu": "6KiB"}),
        ("nothing on it", {0: 0, "cpu": 10**6}),
        ("much", {0: "10GB", "cpu": "10GB"}),
        ("only the device", {0: 10**6}),
        ("too little", {0: 3000}),
        ("host first", {"cpu": 4000, 0: 10**6}),
    ):
        for tied in (False, True):
            for options in (
                {},
                {"no_split_module_classes": ["Block"]},
                {"dtype": torch.float16, "no_split_module_classes": "Block"},
            ):
                label = f"{name}, {'tied' if tied else 'not tied'}, {sorted(options)}"
                see(
                    label,
                    lambda limits=limits, tied=tied, options=options: (
                        infer_auto_device_map(model_of(tied), dict(limits), **options)
                    ),
                )
    for options in (
        {"clean_result": False},
        {"verbose": True},
        {"offload_buffers": True},
        {"fallback_allocation": True},
    ):
        see(
            f"{options}",
            lambda options=options: infer_auto_device_map(
                model_of(), {0: 5000, "cpu": 4000}, **options
            ),
        )
    see(
        "dtypes",
        lambda: infer_auto_device_map(
            model_of(),
            {0: 5000, "cpu": 10**6},
            special_dtypes={"embed.weight": torch.int8},
        ),
    )


@observe("maps")
def balanced_memory(see: Seen) -> None:
    from accelerate.utils import (
        compute_module_sizes,
        get_balanced_memory,
        get_max_layer_size,
        get_max_memory,
    )

    model = model_of()
    for limits in (
        {0: 10**6, "cpu": 10**6},
        {0: "1MB"},
        {0: 10**6, 1: 10**6, "cpu": 10**7},
        {"cpu": 10**6},
    ):
        for low in (False, True):
            see(
                f"{limits}, {low}",
                lambda limits=limits, low=low: get_balanced_memory(
                    model, dict(limits), low_zero=low
                ),
            )
            see(
                f"{limits}, {low}, blocks",
                lambda limits=limits, low=low: get_balanced_memory(
                    model, dict(limits), ["Block"], torch.float16, None, low
                ),
            )
    see("given", lambda: get_max_memory({0: "1GB", "cpu": "1GiB"}))
    see("sizes", compute_module_sizes(model))
    see("half", compute_module_sizes(model, dtype=torch.float16, buffers_only=True))
    sizes = compute_module_sizes(model)
    see(
        "layer", lambda: get_max_layer_size([*model.named_children()], sizes, ["Block"])
    )


@observe("maps")
def tensors_set_by_name(see: Seen) -> None:
    from accelerate.utils import set_module_tensor_to_device

    def made(source_device: str = "cpu") -> nn.Module:
        torch.manual_seed(1)
        return (
            nn.BatchNorm1d(3).to(source_device)
            if source_device != "meta"
            else nn.BatchNorm1d(3, device="meta")
        )

    for source_device in ("cpu", "meta", DEVICE):
        for target in (GPU, DEVICE, torch.device(DEVICE), "cpu", "meta"):
            for value in (None, torch.arange(3.0), torch.arange(3)):
                label = f"{source_device} to {target!r}, {'none' if value is None else value.dtype}"

                def run(
                    source_device: str = source_device,
                    target: Any = target,
                    value: Any = value,
                ) -> Any:
                    module = made(source_device)
                    set_module_tensor_to_device(module, "weight", target, value=value)
                    return [module.weight, type(module.weight).__name__]

                see(label, run)
    module = made()
    see(
        "buffer",
        lambda: (
            set_module_tensor_to_device(module, "running_mean", GPU),
            module.running_mean,
        ),
    )
    for dtype in (torch.float16, torch.bfloat16, torch.int8):
        see(
            f"{dtype}",
            lambda dtype=dtype: (
                set_module_tensor_to_device(
                    module, "weight", GPU, torch.ones(3), dtype=dtype
                ),
                module.weight,
            ),
        )
    see(
        "shape",
        lambda: set_module_tensor_to_device(module, "weight", GPU, torch.ones(4)),
    )
    see("name", lambda: set_module_tensor_to_device(module, "weights", GPU))
    see(
        "nested",
        lambda: (
            set_module_tensor_to_device(model := model_of(), "blocks.0.up.bias", GPU),
            model.blocks[0].up.bias.device,
        ),
    )
    see(
        "frozen",
        lambda: (
            module.bias.requires_grad_(False),
            set_module_tensor_to_device(module, "bias", GPU),
            module.bias.requires_grad,
        ),
    )
    see(
        "non blocking",
        lambda: (
            set_module_tensor_to_device(
                module, "bias", GPU, torch.ones(3), non_blocking=True
            ),
            module.bias,
        ),
    )
    see(
        "statistics",
        lambda: set_module_tensor_to_device(
            made("meta"),
            "weight",
            GPU,
            torch.ones(3, dtype=torch.int8),
            fp16_statistics=torch.ones(3),
        ),
    )
    see("disk", lambda: set_module_tensor_to_device(made(), "weight", "disk"))
    see(
        "cleared",
        lambda: set_module_tensor_to_device(made(), "weight", GPU, clear_cache=False),
    )


@observe("maps")
def empty_models(see: Seen) -> None:
    from accelerate import init_empty_weights, init_on_device

    with init_empty_weights():
        empty = Model()
    see("empty", _places(empty))
    with init_empty_weights(include_buffers=True):
        empty = Model()
    see("empty with buffers", _places(empty))
    with init_on_device(torch.device(DEVICE)):
        torch.manual_seed(0)
        norm_layer = nn.BatchNorm1d(3)
        tensor = torch.ones(2)
    see("on the device", [_places(norm_layer), tensor.device])
    with init_on_device(torch.device(DEVICE), include_buffers=True):
        norm_layer = nn.BatchNorm1d(3)
        tensor = torch.ones(2)
    see("with buffers", [_places(norm_layer), tensor.device, torch.zeros(1).device])
    see(
        "classes",
        lambda: [type(parameter).__name__ for parameter in norm_layer.parameters()],
    )
    with init_empty_weights():
        tied = Model(tied=True)
    see("tied", tied.head.weight is tied.embed.weight)
    see("moved", lambda: empty.to(DEVICE))
    see("to empty", lambda: next(tied.to_empty(device=DEVICE).parameters()).device)


@observe("maps")
def tied_parameters(see: Seen) -> None:
    from accelerate import utils
    from accelerate.utils.modeling import named_module_tensors

    model = model_of(True)
    see("found", utils.find_tied_parameters(model))
    model.to(DEVICE)
    see("on the device", utils.find_tied_parameters(model))
    model.head.weight = nn.Parameter(torch.zeros(VOCABULARY, WIDTH))
    see(
        "retied",
        lambda: (
            utils.retie_parameters(model, [["embed.weight", "head.weight"]]),
            model.head.weight is model.embed.weight,
        ),
    )
    see("named", [name for name, _ in named_module_tensors(model, recurse=True)])
    see(
        "checked",
        lambda: utils.check_tied_parameters_on_same_device(
            [["embed.weight", "head.weight"]], {"embed": 0, "head": "cpu"}
        ),
    )
    for dtype in (
        torch.float32,
        torch.float16,
        torch.bool,
        torch.int8,
        torch.float8_e4m3fn,
    ):
        see(f"{dtype}", lambda dtype=dtype: utils.dtype_byte_size(dtype))
    see("int4", lambda: utils.dtype_byte_size(utils.CustomDtype.INT4))


# -- loading -----------------------------------------------------------------------------------------------------------------
def _written(form: str) -> str:
    from accelerate import Accelerator

    size = "3KB" if "shards" in form else "10GB"
    Accelerator().save_model(
        model_of(), form, max_shard_size=size, safe_serialization="safe" in form
    )
    return form


def _loaded(see: Seen, name: str, form: str, **options: Any) -> None:
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    with init_empty_weights():
        model = Model().eval()

    def run() -> None:
        ready = load_checkpoint_and_dispatch(model, form, **options)
        see(
            f"{name}, map",
            lambda: {
                str(key): str(value) for key, value in ready.hf_device_map.items()
            },
        )
        see(f"{name}, places", _places(ready))
        see(
            f"{name}, dtypes",
            sorted({str(parameter.dtype) for parameter in ready.parameters()}),
        )
        see(f"{name}, hooks", _hooks(ready))
        see(f"{name}, answer", lambda: ready(tokens()))
        see(
            f"{name}, equal",
            lambda: bool(torch.equal(ready(tokens()).cpu(), wanted().cpu())),
        )
        see(
            f"{name}, files",
            lambda: files_in("offload") if Path("offload").exists() else None,
        )

    see(f"{name}, ended", run)


FORMS = ("safe", "safe shards", "pickled", "pickled shards")


@observe("loading")
def loaded_from_each_form(see: Seen) -> None:
    for form in FORMS:
        _written(form)
        see(f"{form}, files", files_in(form))
        _loaded(see, f"{form}, one", form, device_map={"": GPU})
        _loaded(see, f"{form}, mixed", form, device_map=dict(MIXED))


@observe("loading 2")
def loaded_in_each_way(see: Seen) -> None:
    form = _written("safe shards")
    limits: dict[Any, Any] = {0: 5000, "cpu": 10**7} if CUDA else {"cpu": 10**7}
    for strategy in ("auto", "balanced", "balanced_low_0", "sequential"):
        _loaded(
            see,
            strategy,
            form,
            device_map=strategy,
            max_memory=limits,
            no_split_module_classes=["Block"],
        )
    for dtype in (torch.float16, torch.bfloat16, "float16"):
        _loaded(see, f"{dtype}", form, device_map=dict(MIXED), dtype=dtype)
    _loaded(see, "no map", form)
    _loaded(see, "unknown way", form, device_map="middle")
    _loaded(see, "whole by force", form, device_map={"": GPU}, force_hooks=True)
    _loaded(see, "strict", form, device_map={"": GPU}, strict=True)
    _loaded(see, "all memory", form, device_map="auto")


@observe("loading")
def loaded_to_a_disk(see: Seen) -> None:
    for form in ("safe", "pickled"):
        _written(form)
        for name, options in (
            ("plain", {}),
            ("buffers", {"offload_buffers": True}),
            ("state", {"offload_state_dict": True}),
            ("half", {"dtype": torch.float16}),
        ):
            _loaded(
                see,
                f"{form}, {name}",
                form,
                device_map=dict(ON_DISK),
                offload_folder=f"offload {form} {name}",
                **options,
            )
            see(f"{form}, {name}, left", files_in(f"offload {form} {name}"))
    _loaded(see, "no folder", "safe", device_map=dict(ON_DISK))
    _loaded(see, "no folder, pickled", "pickled", device_map=dict(ON_DISK))


@observe("loading")
def loaded_in_place(see: Seen) -> None:
    from accelerate import load_checkpoint_in_model
    from accelerate.utils import load_state_dict

    form = _written("safe")
    for name, options in (
        ("device", {"device_map": {"": GPU}}),
        ("half", {"device_map": {"": GPU}, "dtype": torch.float16}),
        ("mixed", {"device_map": dict(MIXED)}),
        ("host", {}),
        ("broadcast", {"broadcast_from_rank0": True}),
        ("full", {"full_state_dict": False}),
    ):
        model = model_of(seed=8)
        see(
            name,
            lambda model=model, options=options: load_checkpoint_in_model(
                model, form, **options
            ),
        )
        see(f"{name}, places", _places(model))
        see(f"{name}, weight", model.head.weight)
    see("missing", lambda: load_checkpoint_in_model(model_of(), "none"))
    file = "safe/model.safetensors"
    for name, device_map in (
        ("nothing", None),
        ("one", {"": GPU}),
        ("mixed", dict(MIXED)),
        ("disk", dict(ON_DISK)),
    ):
        see(
            f"file, {name}",
            lambda device_map=device_map: {
                key: str(tensor.device)
                for key, tensor in load_state_dict(file, device_map=device_map).items()
            },
        )


# -- clients -----------------------------------------------------------------------------------------------------------------
def _gpt2(folder: str) -> str:
    import transformers

    transformers.set_seed(5)
    config = transformers.GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=4,
        n_head=2,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{index}": index for index in range(63)} | {"[UNK]": 63}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="w0", pad_token="w0"
    ).save_pretrained(folder)
    return folder


def _client(see: Seen, name: str, folder: str, **options: Any) -> None:
    import transformers

    def run() -> None:
        model = transformers.GPT2LMHeadModel.from_pretrained(folder, **options).eval()
        see(
            f"{name}, map",
            lambda: {
                str(key): str(value) for key, value in model.hf_device_map.items()
            },
        )
        see(f"{name}, places", _places(model))
        see(f"{name}, device", lambda: model.device)
        see(f"{name}, hooks", sorted(_hooks(model)))
        see(f"{name}, hook types", _hooks(model))
        prompt = torch.arange(1, 9).reshape(1, 8)
        with torch.no_grad():
            see(f"{name}, logits", lambda: model(prompt.to(DEVICE)).logits)
            see(f"{name}, logits of the host", lambda: model(prompt).logits.device)
        see(
            f"{name}, tokens",
            lambda: model.generate(
                prompt.to(DEVICE), max_new_tokens=6, do_sample=False
            ),
        )
        see(
            f"{name}, saved",
            lambda: (model.save_pretrained(f"saved {name}"), files_in(f"saved {name}"))[
                1
            ],
        )
        see(
            f"{name}, state",
            lambda: {
                key: str(tensor.device) for key, tensor in model.state_dict().items()
            },
        )
        see(f"{name}, moved", lambda: type(model.to(DEVICE)).__name__)
        see(f"{name}, half", lambda: type(model.half()).__name__)

    see(f"{name}, ended", run)


@observe("clients", limit=90)
def transformers_with_a_map(see: Seen) -> None:
    folder = _gpt2("model")
    limits: dict[Any, Any] = {0: 60000, "cpu": 10**8} if CUDA else {"cpu": 10**8}
    spread = {
        "transformer.wte": GPU,
        "transformer.wpe": GPU,
        "transformer.h.0": GPU,
        "transformer.h.1": "cpu",
    }
    spread |= {
        "transformer.h.2": "disk",
        "transformer.h.3": "cpu",
        "transformer.ln_f": GPU,
        "lm_head": GPU,
    }
    _client(see, "auto", folder, device_map="auto")
    _client(see, "device", folder, device_map=DEVICE)
    _client(see, "limits", folder, device_map="auto", max_memory=limits)
    _client(
        see,
        "sequential",
        folder,
        device_map="sequential",
        max_memory=limits,
        dtype=torch.bfloat16,
    )
    _client(see, "given", folder, device_map=spread, offload_folder="offload")
    _client(
        see,
        "buffers",
        folder,
        device_map=spread,
        offload_folder="offload",
        offload_buffers=True,
    )


@observe("clients", limit=90)
def pipelines_with_a_map(see: Seen) -> None:
    import transformers

    folder = _gpt2("model")

    def run(**options: Any) -> Any:
        pipe = transformers.pipeline("text-generation", model=folder, **options)
        text = pipe("w1 w2 w3", max_new_tokens=4, do_sample=False)
        return [
            pipe.device,
            {
                str(key): str(value)
                for key, value in getattr(pipe.model, "hf_device_map", {}).items()
            },
            text,
        ]

    see("auto", lambda: run(device_map="auto"))
    see("device", lambda: run(device=DEVICE))
    see(
        "limits",
        lambda: run(
            device_map="auto",
            model_kwargs={"max_memory": {GPU: 60000 if CUDA else 10**8, "cpu": 10**8}},
        ),
    )


@observe("clients", limit=90)
def generation_with_offloaded_models(see: Seen) -> None:
    import transformers

    from accelerate import cpu_offload, disk_offload

    folder = _gpt2("model")
    prompt = torch.arange(1, 9).reshape(1, 8).to(DEVICE)
    for name, offload in (
        ("host", lambda model: cpu_offload(model, DEVICE)),
        ("disk", lambda model: disk_offload(model, "disk", DEVICE)),
    ):
        model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
        offload(model)
        see(
            f"{name}, tokens",
            lambda model=model: model.generate(
                prompt, max_new_tokens=6, do_sample=False
            ),
        )
        see(f"{name}, device", lambda model=model: model.device)
        see(
            f"{name}, beams",
            lambda model=model: model.generate(
                prompt, max_new_tokens=4, num_beams=2, do_sample=False
            ),
        )
        see(
            f"{name}, tied",
            lambda model=model: model.lm_head.weight is model.transformer.wte.weight,
        )


@observe("clients", limit=90)
def trainer_on_the_device(see: Seen) -> None:
    import transformers

    folder = _gpt2("model")
    rows = [
        {"input_ids": torch.arange(1, 9) + index, "labels": torch.arange(1, 9) + index}
        for index in range(16)
    ]
    for precision in ({}, {"bf16": True}, *([{"fp16": True}] if CUDA else [])):
        model = transformers.GPT2LMHeadModel.from_pretrained(folder)
        options = transformers.TrainingArguments(
            "out", max_steps=4, per_device_train_batch_size=4, logging_steps=1, save_steps=2, report_to=[], disable_tqdm=True, seed=3,
            use_cpu=not CUDA, gradient_accumulation_steps=2, **precision,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=options, train_dataset=rows)
        trainer.remove_callback(transformers.PrinterCallback)
        see(
            f"{precision}, trained",
            lambda trainer=trainer: round(trainer.train().training_loss, 5),
        )
        see(
            f"{precision}, losses",
            [
                [row["loss"], row.get("grad_norm")]
                for row in trainer.state.log_history
                if "loss" in row
            ],
        )
        see(f"{precision}, files", files_in("out"))
        see(
            f"{precision}, evaluated",
            lambda trainer=trainer: trainer.evaluate(rows)["eval_loss"],
        )
        see(
            f"{precision}, wrapped", lambda trainer=trainer: type(trainer.model_wrapped)
        )
