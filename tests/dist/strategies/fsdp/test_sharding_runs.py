"""Runs on sharded models: when replicas talk, clipping over meshes, recompute, metrics, files, and launching."""

from __future__ import annotations

import functools
import gc
import os
import re
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import DataLoader

from hasten import Accelerator
from hasten.checkpoint.export import read_model
from hasten.config.sections.loop import TorchDynamoPlugin
from hasten.config.sections.parallel import (
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from hasten.errors import ConfigError
from hasten.extensions.checkpoint_tools.command import main as ckpt
from hasten.modules import forwarding
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool, ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded
from tests.support.toys import Numbers

VOCAB = 16
Form = Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
HALVES = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)


def model() -> TinyLM:
    return seeded(
        lambda: TinyLM(vocab=VOCAB, width=8, heads=2, depth=2, context=6, tied=True)
    )


def tokens(step: int = 0) -> Tensor:
    return torch.randint(
        0, VOCAB, (4, 6), generator=torch.Generator().manual_seed(step)
    )


def step(accelerator: Accelerator, net: nn.Module, number: int = 0) -> float:
    batch = tokens(number)
    loss = next_token_loss(net(batch), batch)
    accelerator.backward(loss)
    return float(loss.detach())


def losses(steps: int = 3, **settings: Any) -> Tensor:
    accelerator = Accelerator(**settings)
    net, optimizer = accelerator.prepare(
        model(), functools.partial(torch.optim.AdamW, lr=0.05)
    )
    step_losses = []
    for number in range(steps):
        step_losses.append(step(accelerator, net, number))
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(step_losses)


@ranks(4)
def test_replicas_talk_only_where_the_window_ends(ctx: ProcessContext) -> None:
    """Shards are reduced in every micro-step; the all-reduce over the replicate axis waits for the boundary."""
    accelerator = Accelerator(
        strategy="fsdp", parallelism_config=HALVES, gradient_accumulation_steps=3
    )
    net, optimizer = accelerator.prepare(
        model(), functools.partial(torch.optim.SGD, lr=0.1)
    )
    # torch's counting mode makes outputs views
    warnings.filterwarnings("ignore", category=UserWarning)
    reductions = []
    for number in range(6):
        counter = CommDebugMode()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        with counter, accelerator.accumulate(net):
            step(accelerator, net, number)
        optimizer.step()
        optimizer.zero_grad()
        counts = {
            str(op).rpartition(".")[2]: count
            for op, count in counter.get_comm_counts().items()
            if count
        }
        reductions.append(
            (counts.get("_reduce_scatter_base_", 0), counts.get("allreduce_", 0))
        )
    groups = 3  # two blocks and the rest
    assert reductions == [(groups, 0), (groups, 0), (groups, groups)] * 2


@ranks(4)
def test_shards_stay_inside_machines_and_samples_are_counted_once(
    ctx: ProcessContext,
) -> None:
    """Two machines of two processes, as a launcher's variables tell it."""
    os.environ |= {
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_RANK": str(ctx.rank % 2),
        "GROUP_RANK": str(ctx.rank // 2),
    }
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(hybrid_shard=True)
    )
    net = accelerator.prepare(model())
    assert dict(
        zip(
            net.embed.weight.device_mesh.mesh_dim_names,
            net.embed.weight.device_mesh.shape,
            strict=True,
        )
    ) == {
        "dp_replicate": 2,
        "dp_shard": 2,
    }
    loader = accelerator.prepare(DataLoader(Numbers(13), batch_size=2))
    gathered = [
        number
        for batch in loader
        for number in accelerator.gather_for_metrics(batch).tolist()
    ]
    assert sorted(gathered) == list(range(13))


@ranks(4)
def test_one_norm_over_models_on_different_meshes(ctx: ProcessContext) -> None:
    def norm(
        first: Accelerator | None, second: Accelerator | None
    ) -> tuple[float, list[Tensor]]:
        a, b = seeded(lambda: nn.Linear(4, 4)), seeded(lambda: nn.Linear(4, 4), 1)
        x = torch.arange(16.0).reshape(4, 4)
        if first is None or second is None:
            b(a(x)).pow(2).mean().backward()
            total = nn.utils.clip_grad_norm_([*a.parameters(), *b.parameters()], 0.1)
        else:
            a, b = first.prepare(a), second.prepare(b)
            first.backward(b(a(x[ctx.rank : ctx.rank + 1])).pow(2).mean())
            clipped = first.clip_grad_norm_([*a.parameters(), *b.parameters()], 0.1)
            assert clipped is not None
            total = clipped
        grads = [p.grad for p in (*a.parameters(), *b.parameters())]
        return float(total), [
            g.full_tensor() if isinstance(g, DTensor) else g
            for g in grads
            if g is not None
        ]

    expected = norm(None, None)
    sharded, halves = (
        Accelerator(strategy="fsdp"),
        Accelerator(strategy="fsdp", parallelism_config=HALVES),
    )
    for pair in ((sharded, halves), (Accelerator(strategy="ddp"), sharded)):
        torch.testing.assert_close(norm(*pair), expected, rtol=1e-5, atol=1e-6)


@ranks(2)
def test_recompute_offload_compile_and_half_precision(ctx: ProcessContext) -> None:
    """Every way to save memory or time trains to the same losses; fp16 differs by its rounding."""
    plugin = FullyShardedDataParallelPlugin
    blocks = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)
    expected = losses(strategy="ddp")
    # torch's compiler looks at the gradients of the tensors it traces, leaves or not, and torch warns about that
    warnings.filterwarnings(
        "ignore", "The .grad attribute of a Tensor that is not a leaf"
    )
    recomputed = plugin(
        activation_checkpointing=True,
        activation_checkpointing_offload=True,
        cpu_offload=True,
    )
    for settings, tolerance in (
        ({"fsdp_plugin": recomputed}, 1e-5),
        (
            {
                "fsdp_plugin": plugin(activation_checkpointing=True),
                "dynamo_plugin": blocks,
            },
            1e-5,
        ),
        ({"strategy": "fsdp", "mixed_precision": "fp16"}, 1e-2),
    ):
        torch.testing.assert_close(losses(**settings), expected, rtol=0, atol=tolerance)


@ranks(2)
def test_what_is_recomputed(ctx: ProcessContext) -> None:
    """The blocks that are sharded on their own, outermost first; a model without any says so."""

    def recomputed(**options: Any) -> list[str]:
        plugin = FullyShardedDataParallelPlugin(
            activation_checkpointing=True, **options
        )
        net = Accelerator(fsdp_plugin=plugin).prepare(model())
        return [
            name
            for name, module in net.named_modules()
            if forwarding.find(module, "recompute") is not None
        ]

    assert (
        recomputed()
        == recomputed(auto_wrap_policy="no_wrap")
        == ["blocks.0", "blocks.1"]
    )
    assert (
        recomputed(
            auto_wrap_policy=lambda m: isinstance(m, (nn.LayerNorm, nn.Linear))
        ).count("norm")
        == 1
    )
    assert recomputed(transformer_cls_names_to_wrap=("Block", "LayerNorm")) == [
        "blocks.0",
        "blocks.1",
        "norm",
    ]
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(activation_checkpointing=True)
    )
    with pytest.raises(ConfigError, match="Linear has no repeated block"):
        accelerator.prepare(nn.Linear(2, 2))
    accelerator.prepare(nn.Linear(2, 2).requires_grad_(False))


@ranks(2)
def test_the_snippets_of_the_page_run(ctx: ProcessContext, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    page = (Path(__file__).parents[4] / "docs" / "sharding.md").read_text("utf-8")
    for snippet in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(snippet, "docs/sharding.md", "exec"), {})


@ranks(2)
def test_evaluation_between_steps_and_freed_memory(ctx: ProcessContext) -> None:
    accelerator, ddp_accelerator = (
        Accelerator(strategy="fsdp"),
        Accelerator(strategy="ddp"),
    )
    net, optimizer = accelerator.prepare(
        model(), functools.partial(torch.optim.AdamW, lr=0.05)
    )
    beside = ddp_accelerator.prepare(model())  # another strategy in the same process
    for _ in range(2):
        net.eval()
        with torch.no_grad():
            first_output = net(tokens())
        with torch.inference_mode():
            assert torch.equal(net(tokens()), first_output)
        assert all(isinstance(p, DTensor) for p in net.parameters())
        net.train()
        step(accelerator, net)
        step(ddp_accelerator, beside)
        optimizer.step()
        optimizer.zero_grad()
    gone = (
        weakref.ref(net),
        weakref.ref(net.embed.weight),
        weakref.ref(optimizer.optimizer),
    )
    net, optimizer = accelerator.free_memory(net, optimizer)
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]


def save(ctx: ProcessContext, folder: Path, form: Form) -> dict[str, Tensor]:
    """Save on shards (with replicas when there are four ranks), load on shards over all ranks; the whole weights."""
    layout: dict[str, Any] = (
        {"parallelism_config": HALVES} if ctx.world.size == 4 else {}
    )
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(state_dict_type=form), **layout
    )
    net, optimizer = accelerator.prepare(
        model(), functools.partial(torch.optim.AdamW, lr=0.05)
    )
    step(accelerator, net)
    optimizer.step()
    accelerator.save_state(folder)
    fresh = Accelerator(strategy="fsdp")
    reloaded, reloaded_optimizer = fresh.prepare(
        model(), functools.partial(torch.optim.AdamW, lr=0.05)
    )
    fresh.load_state(folder)
    for old, new in zip(net.parameters(), reloaded.parameters(), strict=True):
        assert torch.equal(whole(old), whole(new))
        for key, value in optimizer.state[old].items():
            assert torch.equal(whole(value), whole(reloaded_optimizer.state[new][key]))
    return dict(accelerator.get_state_dict(net))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_shards_are_merged_offline_and_whole_checkpoints_are_whole(
    rank_pool: Pool, tmp_path: Path
) -> None:
    """`hasten ckpt merge` gives what gathering the model gives; FULL_STATE_DICT writes that at once."""
    state = rank_pool.run(save, 3, tmp_path / "shards", "SHARDED_STATE_DICT")[0]
    assert ckpt(["merge", str(tmp_path / "shards"), str(tmp_path / "merged")]) == 0
    merged = read_model(tmp_path / "merged")
    assert merged.keys() == state.keys()
    # still tied
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert all(torch.equal(merged[name], state[name]) for name in state)
    state = rank_pool.run(save, 4, tmp_path / "whole", "FULL_STATE_DICT")[0]
    written = load_file(tmp_path / "whole" / "model.safetensors")
    assert state.keys() - written.keys() == {"head.weight"}  # tied: stored once
    assert all(torch.equal(value, state[name]) for name, value in written.items())
    assert not list((tmp_path / "whole").glob("*_shard_*"))
    single_state = rank_pool.run(save, 1, tmp_path / "alone", "FULL_STATE_DICT")[0]
    written = load_file(tmp_path / "alone" / "model.safetensors")
    assert all(
        torch.equal(value, single_state[name]) for name, value in written.items()
    )
    assert not list((tmp_path / "alone").glob("*_shard_*"))


HF_FILE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_sharding_strategy: 2
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: true
  fsdp_use_orig_params: true
mixed_precision: bf16
num_processes: 2
use_cpu: true
"""
SCRIPT = """\
import torch
from torch.distributed.fsdp import FSDPModule
from hasten import Accelerator
from hasten.testing.toys import TinyLM, next_token_loss

accelerator = Accelerator()
with torch.device("cpu" if accelerator.is_main_process else "meta"):
    net = TinyLM(vocab=16, width=8, heads=2, context=6)
net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
batch = torch.arange(24).reshape(4, 6) % 16
accelerator.backward(next_token_loss(net(batch), batch))
optimizer.step()
groups = sum(isinstance(module, FSDPModule) for module in net.modules())
fsdp = accelerator.config.fsdp
accelerator.print(accelerator.strategy, groups, fsdp.reshard_after_forward, fsdp.cpu_offload, accelerator.ctx.mesh)
"""


@pytest.mark.exhaustive
def test_an_accelerate_file_of_fsdp1_launches_a_sharded_run(tmp_path: Path) -> None:
    """Its keys are translated, which is said once, and decide how the model is sharded."""
    (tmp_path / "theirs.yaml").write_text(HF_FILE)
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "hasten.cli.main",
        "launch",
        "--config_file",
        "theirs.yaml",
        "train.py",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (
        "fsdp 3 False True MeshSpec(pp=1, dp_replicate=1, dp_shard=2, cp=1, tp=1, ep=1)"
        in done.stdout
    )
    output = done.stdout + done.stderr
    assert (
        output.count(
            "fsdp_sharding_strategy SHARD_GRAD_OP is FSDP2's reshard_after_forward: false"
        )
        == 1
    )
    assert output.count("fsdp_backward_prefetch_policy has no meaning any more") == 1
