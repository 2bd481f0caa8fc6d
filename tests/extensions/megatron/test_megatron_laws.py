"""A Megatron engine trains as the transformers model does in one plain process: tensor, pipeline, data parallel.

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
from hasten.extensions.megatron.package import VERSIONS
from hasten.optional import available
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool, ranks

pytestmark = [
    # a worker imports transformers and megatron-core at its first test
    pytest.mark.timeout(300),
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
def test_two_ranks_train_as_plain_torch(
    ctx: ProcessContext, tmp_path: Path, family: str, layout: str
) -> None:
    kit().assert_trains_alike(ctx, family, kit().LAYOUTS[layout], tmp_path)


@ranks(4, timeout_s=LONG)
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "layout",
    [
        {"tp_degree": 2, "pp_degree": 2},
        {"tp_degree": 2, "sequence_parallelism": True, "recompute_granularity": "full"},
        {
            "pp_degree": 2,
            "recompute_activations": True,
            "use_distributed_optimizer": True,
        },
    ],
    ids=["tp2pp2", "tp2dp2", "pp2dp2"],
)
def test_four_ranks_train_as_plain_torch(
    ctx: ProcessContext, tmp_path: Path, family: str, layout: dict[str, Any]
) -> None:
    kit().assert_trains_alike(ctx, family, layout, tmp_path)


@ranks(2, timeout_s=LONG)
@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_a_loss_of_the_loops_own_on_whole_logits(
    ctx: ProcessContext, layout: str
) -> None:
    """The model returns the logits of every token and the whole vocabulary, and its gradients are those of plain torch."""

    def loss_of(model: Any, batch: Any) -> torch.Tensor:
        logits = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        )

    with kit().on_cpu():
        accelerator = kit().engine({**kit().LAYOUTS[layout], "return_logits": True})
        run = kit().Run(accelerator, kit().language_model("gpt2"), 1)
        batch = next(iter(run.loader))
        outputs = run.model(**batch)
        torch.testing.assert_close(
            outputs.loss, loss_of(run.model, batch), rtol=0, atol=1e-6
        )
        accelerator.backward(loss_of(run.model, batch))
        norm = accelerator.clip_grad_norm_(run.model.parameters(), 0.4)
    plain = kit().Plain("gpt2", 1)
    torch.testing.assert_close(outputs.loss.item(), plain.losses[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(float(norm), plain.norms[0], rtol=0, atol=5e-5)


@ranks(2, timeout_s=LONG)
@pytest.mark.parametrize(
    "layout",
    [
        {"tp_degree": 2, "sequence_parallelism": True, "recompute_activations": True},
        pytest.param(
            {
                "tp_degree": 2,
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 2,
            },
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


@ranks(2, timeout_s=LONG)
@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "layout"), [("llama", "pp2")])
def test_a_model_without_weights_is_initialised_by_the_engine(
    ctx: ProcessContext, family: str, layout: str
) -> None:
    with kit().on_cpu():
        with torch.device("meta"):
            model = kit().language_model(family)
        run = kit().Run(
            kit().engine(kit().LAYOUTS[layout]), model, kit().split_of(layout)
        )
        weights = run.accelerator.get_state_dict(run.model)
        run.steps(8)
    assert weights.keys() == kit().language_model(family).state_dict().keys()
    matrices = [value for name, value in weights.items() if value.ndim > 1]
    assert all(value.isfinite().all() and value.std() > 0 for value in matrices)
    assert sum(run.losses[4:]) < sum(run.losses[:4])  # the same four batches again


# ---------------------------------------------------------------- precision and checkpoints


@pytest.mark.exhaustive
@ranks(2, timeout_s=LONG)
def test_bf16_keeps_masters(ctx: ProcessContext) -> None:
    """Weights of 16 bits beside float32 masters: the curve is that of fp32 up to the rounding of weights."""
    with kit().on_cpu():
        run = kit().Run(
            kit().engine({"tp_degree": 2}, mixed_precision="bf16"),
            kit().language_model("llama"),
            1,
        )
        run.steps(8)
        assert {p.dtype for p in run.model.parameters()} == {torch.bfloat16}
        masters = [
            v["master"].data.dtype for v in run.optimizer.state_dict()["state"].values()
        ]
    assert set(masters) == {torch.float32}
    plain = kit().Plain("llama", 8)
    torch.testing.assert_close(
        torch.tensor(run.losses), torch.tensor(plain.losses), rtol=0, atol=3e-2
    )
    assert run.losses != plain.losses


@pytest.mark.exhaustive
@ranks(2, timeout_s=LONG)
@pytest.mark.parametrize(
    ("family", "layout", "precision"),
    [
        ("gpt2", "tp2", "no"),
        ("gpt2", "pp2", "bf16"),
        ("gpt2", "dp2", "no"),
        ("gpt2", "shared", "no"),
        ("gpt2", "shared", "bf16"),
    ],
)
def test_a_run_goes_on_bit_for_bit(
    ctx: ProcessContext, tmp_path: Path, family: str, layout: str, precision: str
) -> None:
    """Also with dropout, whose random numbers depend on the seed, the batch and the place alone."""
    kit().assert_goes_on(
        kit().LAYOUTS[layout], precision, kit().split_of(layout), tmp_path, family
    )


@pytest.mark.exhaustive
@ranks(4, timeout_s=LONG)
def test_shares_of_tensor_parallel_ranks_go_on_bit_for_bit(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    kit().assert_goes_on(
        {"tp_degree": 2, "use_distributed_optimizer": True}, "bf16", 2, tmp_path
    )


def save_some(
    ctx: ProcessContext, folder: Path, family: str, layout: str
) -> list[float]:
    losses: list[float] = kit().save_some(
        folder, kit().LAYOUTS[layout], kit().split_of(layout), family
    )
    return losses


def load_some(
    ctx: ProcessContext, folder: Path, family: str, layout: str
) -> list[float]:
    losses: list[float] = kit().load_some(
        folder, kit().LAYOUTS[layout], kit().split_of(layout), family
    )
    return losses


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "saved", "loaded"),
    [
        ("gpt2", "tp2", "pp2"),
        ("gpt2", "pp2", "dp2"),
        ("gpt2", "dp2", "tp2"),
    ],
)
def test_a_checkpoint_loads_in_another_layout(
    rank_pool: Pool, tmp_path: Path, family: str, saved: str, loaded: str
) -> None:
    expected_losses = torch.tensor(
        rank_pool.run(save_some, 2, tmp_path, family, saved, timeout_s=LONG)[0]
    )
    loaded_losses = torch.tensor(
        rank_pool.run(load_some, 2, tmp_path, family, loaded, timeout_s=LONG)[0]
    )
    torch.testing.assert_close(loaded_losses, expected_losses, rtol=0, atol=2e-5)


# ---------------------------------------------------------------- what is refused


def test_the_cpu_is_refused_in_one_sentence() -> None:
    with pytest.raises(
        ConfigError, match="megatron-core needs CUDA; train on NVIDIA GPUs"
    ) as caught:
        Accelerator(strategy="megatron", cpu=True)
    assert "\n" not in str(caught.value)


@ranks(2, timeout_s=LONG)
def test_what_an_engine_cannot_do_is_refused(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    with kit().on_cpu():
        accelerator = kit().engine({"pp_degree": 2}, gradient_accumulation_steps=2)
        net = torch.nn.Linear(2, 2)
        with pytest.raises(
            PrepareError,
            match="only these architectures can be trained: gpt2, llama",
        ):
            accelerator.prepare(net, torch.optim.SGD(net.parameters()))
        frozen = kit().language_model("gpt2")
        frozen.transformer.wpe.requires_grad_(False)
        with pytest.raises(
            PrepareError, match="requires gradients, but is not in the optimizer"
        ):
            accelerator.prepare(
                frozen, torch.optim.SGD(frozen.transformer.wte.parameters())
            )
        run = kit().Run(accelerator, kit().language_model("gpt2"), 1)
        batch = next(iter(DataLoader(kit().samples(), batch_size=kit().ROWS)))
        with pytest.raises(StepError, match="call the model under"):
            run.model(**batch)
        with pytest.raises(StepError, match="forward_backward"):
            accelerator.backward(torch.ones((), requires_grad=True))
        with torch.no_grad(), pytest.raises(StepError, match="layers do not support"):
            run.model(**batch, inputs_embeds=torch.ones(1))
        second_model = kit().language_model("gpt2")
        with pytest.raises(PrepareError, match="one model with one optimizer"):
            accelerator.prepare(second_model, kit().optimizer_of(second_model))
        run.steps(1)
        with pytest.raises(StepError, match=r"Pass model.parameters\(\)"):
            accelerator._strategy.clip_norm(list(run.model.parameters())[:1], 1.0, 2.0)
        with pytest.raises(StepError, match="remove norm_type"):
            accelerator._strategy.clip_norm(list(run.model.parameters()), 1.0, 1.0)
        model = kit().language_model("gpt2")
        with pytest.raises(ConfigError, match="one layout per process"):
            kit().engine({"tp_degree": 2}).prepare(model, kit().optimizer_of(model))


@ranks(2, timeout_s=LONG)
def test_shares_of_the_optimizer_state_are_refused_where_they_do_not_fit(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    with kit().on_cpu():
        model = kit().language_model("gpt2")
        with pytest.raises(
            PrepareError, match="only distributes the state of Adam and AdamW"
        ):
            kit().engine(kit().LAYOUTS["shared"]).prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1)
            )
        run = kit().Run(
            kit().engine(kit().LAYOUTS["shared"]), kit().language_model("gpt2"), 2
        )
        run.steps(1)
        state_slots = [
            slot
            for slot in run.optimizer.state_dict()["state"].values()
            if slot["exp_avg"].data.numel()
        ]
        everyone = ctx.world.all_gather_object(
            sum(slot["exp_avg"].data.numel() for slot in state_slots)
        )
        assert sum(everyone) == sum(p.numel() for p in run.model.parameters())
        # each rank keeps its share of the moments
        assert max(everyone) < 0.6 * sum(everyone)
        run.accelerator.save_state(tmp_path / "state")
        unsharded_run = kit().Run(
            kit().engine(kit().LAYOUTS["dp2"]), kit().language_model("gpt2"), 2
        )
        with pytest.raises(
            CheckpointError,
            match="use_distributed_optimizer=True, and this run has False",
        ):
            unsharded_run.accelerator.load_state(tmp_path / "state")


@ranks(2, timeout_s=LONG)
def test_batches_that_a_layout_cannot_divide_are_refused(ctx: ProcessContext) -> None:
    with kit().on_cpu():
        layout = {"tp_degree": 2, "sequence_parallelism": True, "seq_length": 12}
        run = kit().Run(kit().engine(layout), kit().language_model("llama"), 1)
        batch = next(iter(run.loader))
        with pytest.raises(
            StepError,
            match=r"of 11 tokens, and megatron\.seq_length=12; pad to that length",
        ):
            run.model(**{**batch, "input_ids": batch["input_ids"][:, :11]})
        with pytest.raises(StepError, match="which the engine's layers do not support"):
            run.model(**batch, position_ids=batch["input_ids"])
        with pytest.raises(StepError, match="without input_ids"):
            run.model(labels=batch["labels"])


@ranks(2, timeout_s=LONG)
def test_models_that_do_not_fit_are_refused(ctx: ProcessContext) -> None:
    transformers = pytest.importorskip("transformers")
    with kit().on_cpu():
        accelerator = kit().engine(kit().LAYOUTS["tp2"])
        classifier = transformers.LlamaForSequenceClassification(
            kit().language_model("llama").config
        )
        with pytest.raises(
            PrepareError, match=r"LlamaForSequenceClassification.*LlamaForCausalLM"
        ):
            accelerator.prepare(classifier, torch.optim.SGD(classifier.parameters()))
