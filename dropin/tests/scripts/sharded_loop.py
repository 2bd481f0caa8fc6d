"""Sharded training with the established names, started by `accelerate launch --use_fsdp`. Usage: sharded_loop.py FOLDER"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from accelerate import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    PartialState,
    load_checkpoint_and_dispatch,
)
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DistributedType,
    fsdp2_apply_ac,
    fsdp2_load_full_state_dict,
    load_checkpoint_in_model,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
    set_seed,
)
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


def make():
    set_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def batch(step, rank=0, ranks=1):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x[rank::ranks], x.sum(1, keepdim=True)[rank::ranks]


def train(accelerator, model, optimizer, steps):
    losses = []
    for step in steps:
        x, y = batch(step, accelerator.process_index, accelerator.num_processes)
        loss = (model(x) - y).pow(2).mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def start(**plugin):
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    initial_variables = dict(os.environ)
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(**plugin) if plugin else None
    )
    final_variables = {
        name: value
        for name, value in os.environ.items()
        if not name.endswith("_SOCKET_IFNAME")
    }  # of the group's transport
    assert (
        final_variables.items() <= initial_variables.items()
    )  # settings given in code stay there
    assert accelerator.distributed_type == DistributedType.FSDP and accelerator.is_fsdp2
    return accelerator


def by_flags():
    """What the launcher was told arrives: in the plugin, in the variables, in the model."""
    accelerator = start()
    plugin = accelerator.state.fsdp_plugin
    assert (
        plugin.transformer_cls_names_to_wrap == ["Block"] and plugin.fsdp_version == 2
    )
    assert (
        os.environ["ACCELERATE_USE_FSDP"] == "true"
        and os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "Block"
    )
    model, optimizer = accelerator.prepare(*make())
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == 3
    losses = train(accelerator, model, optimizer, range(4))
    full_state = accelerator.get_state_dict(model)
    return losses, {name: value.tolist() for name, value in full_state.items()}


def write_plain(folder):
    """Two steps on one process, saved as the original package saves them: whole, the optimizer by position."""
    model, optimizer = make()
    for step in range(2):
        x, y = batch(step)
        (model(x) - y).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")


def round_trips(folder):
    """State written half way by one layout goes on in another, by hand and with save_state."""
    wrap_policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    writers = {
        "sharded": {
            "fsdp_version": 1,
            "auto_wrap_policy": wrap_policy,
            "sharding_strategy": "SHARD_GRAD_OP",
            "state_dict_type": "SHARDED_STATE_DICT",
        },
        "full": {
            "state_dict_type": "FULL_STATE_DICT",
            "cpu_offload": True,
            "activation_checkpointing": True,
        },
    }
    losses_by_source = {}
    for name, options in writers.items():
        writer_folder = folder / name
        accelerator = start(**options)
        model, optimizer = accelerator.prepare(*make())
        train(accelerator, model, optimizer, range(2))
        save_fsdp_model(
            accelerator.state.fsdp_plugin, accelerator, model, writer_folder
        )
        save_fsdp_optimizer(
            accelerator.state.fsdp_plugin, accelerator, optimizer, model, writer_folder
        )
        accelerator.save_state(str(writer_folder / "state"))
        accelerator.save_model(model, str(writer_folder / "exported"))
        if name == "sharded":  # once more as the original package writes shards
            state = {"optimizer": get_optimizer_state_dict(model, optimizer.optimizer)}
            dcp.save(
                {"model": model.state_dict()},
                checkpoint_id=str(folder / "dcp" / "pytorch_model_fsdp_0"),
            )
            dcp.save(state, checkpoint_id=str(folder / "dcp" / "optimizer_0"))
        losses_by_source[name] = train(accelerator, model, optimizer, range(2, 4))
    for name in ("sharded", "full", "dcp"):
        accelerator = start(transformer_cls_names_to_wrap="Linear")
        model, optimizer = accelerator.prepare(*make())
        load_fsdp_model(
            accelerator.state.fsdp_plugin, accelerator, model, folder / name
        )
        load_fsdp_optimizer(
            accelerator.state.fsdp_plugin, accelerator, optimizer, model, folder / name
        )
        losses_by_source[f"{name} by hand"] = train(
            accelerator, model, optimizer, range(2, 4)
        )
    if PartialState().is_main_process:
        write_plain(folder / "plain")
    PartialState().wait_for_everyone()
    for name in ("sharded/state", "dcp", "plain"):
        accelerator = start(reshard_after_forward=False)
        model, optimizer = accelerator.prepare(*make())
        accelerator.load_state(str(folder / name))
        losses_by_source[f"{name} by load_state"] = train(
            accelerator, model, optimizer, range(2, 4)
        )
    return losses_by_source


def late_changes():
    """A plugin changed before the first model counts; afterwards it is an error, and weights can still be filled."""
    accelerator = start()
    plain = make()[0]
    is_wrapped = fsdp2_prepare_auto_wrap_policy(accelerator.state.fsdp_plugin, plain)
    assert [
        name for name, submodule in plain.named_modules() if is_wrapped(submodule)
    ] == [
        "1",
        "2",
    ]
    recomputed_model = fsdp2_apply_ac(accelerator, make()[0])
    x, y = batch(0)
    for model in (plain, recomputed_model):
        (model(x) - y).pow(2).mean().backward()
    grads = zip(plain.parameters(), recomputed_model.parameters(), strict=True)
    assert all(
        torch.equal(parameter.grad, recomputed_parameter.grad)
        for parameter, recomputed_parameter in grads
    )
    accelerator.state.fsdp_plugin.sharding_strategy = "HYBRID_SHARD"
    with pytest.raises(ValueError, match="laid the processes out"):
        accelerator.prepare(make()[0])
    accelerator.state.fsdp_plugin.sharding_strategy = None
    accelerator.state.fsdp_plugin.auto_wrap_policy = lambda module: isinstance(
        module, nn.Linear
    )
    model = accelerator.prepare(make()[0])
    assert sum(isinstance(submodule, FSDPModule) for submodule in model.modules()) == 5
    accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    accelerator.prepare(make()[1].__class__(model.parameters()))
    accelerator.state.fsdp_plugin.auto_wrap_policy = "NO_WRAP"
    with pytest.raises(ValueError, match=r"before the first prepare\(\)"):
        accelerator.prepare(make()[0])
    full_state = {
        name: torch.full_like(value, 2.0)
        for name, value in make()[0].state_dict().items()
    }
    fsdp2_load_full_state_dict(
        accelerator, model, full_state if accelerator.is_main_process else {}
    )
    assert all(
        bool((value == 2.0).all())
        for value in (p.full_tensor() for p in model.parameters())
    )


def whole_weights(folder):
    """A file fills sharded models, and any model on every rank where only the first one has it."""
    accelerator = start()
    model, plain, file = (
        accelerator.prepare(make()[0]),
        make()[0],
        folder / "whole.safetensors",
    )
    if accelerator.is_main_process:
        save_file(
            {
                name: torch.full_like(value, 3.0)
                for name, value in plain.state_dict().items()
            },
            file,
        )
    local_file = file if accelerator.is_main_process else folder / "nowhere.safetensors"
    load_checkpoint_in_model(model, local_file, broadcast_from_rank0=True)
    load_checkpoint_and_dispatch(plain, local_file, broadcast_from_rank0=True)
    reloaded = accelerator.prepare(make()[0])
    load_checkpoint_in_model(reloaded, file)
    full = [
        parameter.full_tensor()
        for sharded_model in (model, reloaded)
        for parameter in sharded_model.parameters()
    ]
    assert all(bool((value == 3.0).all()) for value in (*full, *plain.parameters()))


def main(folder):
    losses, weights = by_flags()
    report = {"losses": losses, "weights": weights, "continued": round_trips(folder)}
    late_changes()
    whole_weights(folder)
    if PartialState().is_main_process:
        (folder / "found.json").write_text(json.dumps(report))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
