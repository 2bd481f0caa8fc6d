"""A Megatron engine trains as the transformers model does in one plain process: tensor, pipeline, context, expert, data parallel.

What is trained, and how megatron-core runs on the CPU, is in `megatron_training.py`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch.utils.data import DataLoader

from hasten import Accelerator
from hasten.errors import CheckpointError, ConfigError, PrepareError, StepError
from hasten.optional import available
from hasten.runtime.context import ProcessContext
from hasten.strategies.megatron_package import VERSIONS
from hasten.testing.pool import Pool, ranks

pytestmark = [
    pytest.mark.timeout(300),  # a worker imports transformers and megatron-core at its first test
    pytest.mark.skipif(
        not (available("megatron", VERSIONS) and available("transformers")),
        reason=f"megatron-core{VERSIONS} or transformers is not installed (pip install 'hasten[megatron]' transformers)",
    ),
]

KIT: Final = Path(__file__).with_name("megatron_training.py")
LONG: Final = 240.0
"""A worker imports transformers and megatron-core at its first test, which takes long on a busy machine."""


def kit() -> Any:
    """`megatron_training.py`, loaded in the process that asks."""
    if KIT.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(KIT.stem, KIT)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[KIT.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[KIT.stem])
    return sys.modules[KIT.stem]


@ranks(2, timeout_s=LONG)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("gpt2", "tp2"),
        ("llama", "tp2"),
        ("gpt2", "pp2"),
        ("llama", "pp2"),
        ("gpt2", "dp2"),
        ("gpt2", "shared"),
        pytest.param("llama", "dp2", marks=pytest.mark.exhaustive),
    ],
)
def test_two_ranks_train_as_plain_torch(ctx: ProcessContext, tmp_path: Path, family: str, layout: str) -> None:
    kit().assert_trains_alike(ctx, family, kit().LAYOUTS[layout], tmp_path)


@ranks(4, timeout_s=LONG)
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "layout",
    [
        {"tp_degree": 2, "pp_degree": 2},
        {"tp_degree": 2, "sequence_parallelism": True, "recompute_granularity": "full"},
        {"pp_degree": 2, "recompute_activations": True, "use_distributed_optimizer": True},
    ],
    ids=["tp2pp2", "tp2dp2", "pp2dp2"],
)
def test_four_ranks_train_as_plain_torch(
    ctx: ProcessContext, tmp_path: Path, family: str, layout: dict[str, Any]
) -> None:
    kit().assert_trains_alike(ctx, family, layout, tmp_path)


@ranks(2, timeout_s=LONG)
@pytest.mark.parametrize(
    "layout",
    [
        {"tp_degree": 2, "sequence_parallelism": True, "recompute_activations": True},
        pytest.param(
            {"tp_degree": 2, "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["sequence", "full"],
)
def test_sequence_parallel_and_recompute_change_no_number(
    ctx: ProcessContext, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """Without a pipeline the loop may call the model and backward() itself."""
    kit().assert_trains_alike(ctx, "gpt2", layout, tmp_path, by_hand=True)


# ---------------------------------------------------------------- precision and checkpoints


@pytest.mark.exhaustive
@ranks(2, timeout_s=LONG)
def test_bf16_keeps_masters(ctx: ProcessContext) -> None:
    """Weights of 16 bits beside float32 masters: the curve is that of fp32 up to the rounding of weights."""
    with kit().on_cpu():
        run = kit().Run(kit().engine({"tp_degree": 2}, mixed_precision="bf16"), kit().language_model("llama"), 1)
        run.steps(8)
        assert {p.dtype for p in run.model.parameters()} == {torch.bfloat16}
        masters = [v["master"].data.dtype for v in run.optimizer.state_dict()["state"].values()]
    assert set(masters) == {torch.float32}
    plain = kit().Plain("llama", 8)
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(plain.losses), rtol=0, atol=3e-2)
    assert run.losses != plain.losses


@pytest.mark.exhaustive
@ranks(2, timeout_s=LONG)
@pytest.mark.parametrize(
    ("layout", "precision"), [("tp2", "no"), ("pp2", "bf16"), ("dp2", "no"), ("shared", "no"), ("shared", "bf16")]
)
def test_a_run_goes_on_bit_for_bit(ctx: ProcessContext, tmp_path: Path, layout: str, precision: str) -> None:
    """Also with dropout, whose random numbers depend on the seed, the batch and the place alone."""
    kit().assert_goes_on(kit().LAYOUTS[layout], precision, kit().split_of(layout), tmp_path)


@pytest.mark.exhaustive
@ranks(4, timeout_s=LONG)
def test_shares_of_tensor_parallel_ranks_go_on_bit_for_bit(ctx: ProcessContext, tmp_path: Path) -> None:
    kit().assert_goes_on({"tp_degree": 2, "use_distributed_optimizer": True}, "bf16", 2, tmp_path)


def save_some(ctx: ProcessContext, folder: Path, layout: str) -> list[float]:
    with kit().on_cpu():
        run = kit().Run(kit().engine(kit().LAYOUTS[layout]), kit().language_model("gpt2"), kit().split_of(layout))
        run.steps(4)
        run.accelerator.save_state(folder / "state")
        run.accelerator.save_model(run.model, folder / "weights")
        run.steps(8)
        return run.losses[4:]


def load_some(ctx: ProcessContext, folder: Path, layout: str) -> list[float]:
    with kit().on_cpu():
        run = kit().Run(
            kit().engine(kit().LAYOUTS[layout]), kit().language_model("gpt2", seed=4), kit().split_of(layout)
        )
        run.accelerator.load_model(run.model, folder / "weights")
        weights = run.accelerator.get_state_dict(run.model)
        run.accelerator.load_state(folder / "state")
        for name, value in run.accelerator.get_state_dict(run.model).items():
            assert torch.equal(value, weights[name]), name
        run.steps(8)
        return run.losses


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("tp2", "pp2"),
        pytest.param("pp2", "dp2", marks=pytest.mark.exhaustive),
        pytest.param("dp2", "tp2", marks=pytest.mark.exhaustive),
    ],
)
def test_a_checkpoint_loads_in_another_layout(rank_pool: Pool, tmp_path: Path, saved: str, loaded: str) -> None:
    after = torch.tensor(rank_pool.run(save_some, 2, tmp_path, saved, timeout_s=LONG)[0])
    found = torch.tensor(rank_pool.run(load_some, 2, tmp_path, loaded, timeout_s=LONG)[0])
    torch.testing.assert_close(found, after, rtol=0, atol=2e-5)


# ---------------------------------------------------------------- what is refused


def test_the_cpu_is_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match="megatron-core calls CUDA throughout; train on NVIDIA GPUs") as caught:
        Accelerator(strategy="megatron", cpu=True)
    assert "\n" not in str(caught.value)


@ranks(2, timeout_s=LONG)
def test_what_an_engine_cannot_do_is_refused(ctx: ProcessContext, tmp_path: Path) -> None:
    with kit().on_cpu():
        accelerator = kit().engine({"pp_degree": 2}, gradient_accumulation_steps=2)
        net = torch.nn.Linear(2, 2)
        with pytest.raises(
            PrepareError, match="only known architectures can be trained: gpt2, llama, mixtral, bert, t5"
        ):
            accelerator.prepare(net, torch.optim.SGD(net.parameters()))
        frozen = kit().language_model("gpt2")
        frozen.transformer.wpe.requires_grad_(False)
        with pytest.raises(PrepareError, match="takes gradients, but the optimizer does not hold it"):
            accelerator.prepare(frozen, torch.optim.SGD(frozen.transformer.wte.parameters()))
        run = kit().Run(accelerator, kit().language_model("gpt2"), 1)
        batch = next(iter(DataLoader(kit().samples(), batch_size=kit().ROWS)))  # type: ignore[arg-type]
        with pytest.raises(StepError, match="call the model under"):
            run.model(**batch)
        with pytest.raises(StepError, match="forward_backward"):
            accelerator.backward(torch.ones((), requires_grad=True))
        with torch.no_grad(), pytest.raises(StepError, match="would ignore"):
            run.model(**batch, inputs_embeds=torch.ones(1))
        other = kit().language_model("gpt2")
        with pytest.raises(PrepareError, match="one model with one optimizer"):
            accelerator.prepare(other, kit().optimizer_of(other))
        run.steps(1)
        with pytest.raises(CheckpointError, match="middle of an accumulation window"):
            accelerator.save_state(tmp_path / "state")
        with pytest.raises(StepError, match=r"Pass model.parameters\(\)"):
            accelerator.strategy.clip_norm(list(run.model.parameters())[:1], 1.0, 2.0)
        with pytest.raises(StepError, match="leave norm_type out"):
            accelerator.strategy.clip_norm(list(run.model.parameters()), 1.0, 1.0)
        model = kit().language_model("gpt2")
        with pytest.raises(ConfigError, match="one layout per process"):
            kit().engine({"tp_degree": 2}).prepare(model, kit().optimizer_of(model))


@ranks(2, timeout_s=LONG)
def test_shares_of_the_optimizer_state_are_refused_where_they_do_not_fit(ctx: ProcessContext, tmp_path: Path) -> None:
    with kit().on_cpu():
        model = kit().language_model("gpt2")
        with pytest.raises(PrepareError, match="shares the state of Adam and AdamW only"):
            kit().engine(kit().LAYOUTS["shared"]).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run = kit().Run(kit().engine(kit().LAYOUTS["shared"]), kit().language_model("gpt2"), 2)
        run.steps(1)
        held = [slot for slot in run.optimizer.state_dict()["state"].values() if slot["exp_avg"].data.numel()]
        everyone = ctx.world.all_gather_object(sum(slot["exp_avg"].data.numel() for slot in held))
        assert sum(everyone) == sum(p.numel() for p in run.model.parameters())
        assert max(everyone) < 0.6 * sum(everyone)  # each rank keeps its share of the moments
        run.accelerator.save_state(tmp_path / "state")
        whole = kit().Run(kit().engine(kit().LAYOUTS["dp2"]), kit().language_model("gpt2"), 2)
        with pytest.raises(CheckpointError, match="use_distributed_optimizer=True, and this run has False"):
            whole.accelerator.load_state(tmp_path / "state")
