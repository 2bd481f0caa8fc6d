"""Muon, packing and the chunked loss as arguments of the Trainer: equal to the same steps written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hasten import (
    Accelerator,
    DataLoaderConfiguration,
    Trainer,
    TrainingArguments,
    optimizers,
    set_seed,
)
from hasten.data import packed_attention_mask
from hasten.errors import ConfigError
from hasten.extensions.trainer.schedules import OptimizerList, make_optimizer
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.trainer import default_data_collator, get_scheduler

PRELOAD: Final = ("transformers.modeling_utils",)


class Net(nn.Module):
    """Classifier with a hidden matrix, for Muon, and a head and vectors, for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.layers(x))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def rows(count: int = 40) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(3)
    return [
        {"x": torch.randn(6, generator=draw), "labels": torch.tensor(i % 3)}
        for i in range(count)
    ]


def muon(folder: str, **options: Any) -> Trainer:
    args = TrainingArguments(
        folder,
        use_cpu=True,
        optim="muon",
        learning_rate=1e-2,
        muon_learning_rate=0.05,
        weight_decay=0.1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        warmup_steps=2,
        save_steps=3,
        disable_tqdm=True,
        **{"max_steps": 8, **options},
    )
    return Trainer(Net(), args, train_dataset=rows())


def weights_of(trainer: Trainer) -> list[Tensor]:
    found = trainer.accelerator.get_state_dict(trainer.wrapped_model)
    return [found[name].clone() for name in sorted(found)]


def by_hand(folder: str, steps: int) -> list[Tensor]:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        project_dir=folder,
        dataloader_config=DataLoaderConfiguration(data_seed=42),
    )
    model: Any = Net()
    set_seed(42, device_specific=True, rank=accelerator.process_index)
    loader: Any = accelerator.prepare(
        DataLoader(rows(), batch_size=4, shuffle=True, collate_fn=default_data_collator)  # type: ignore[arg-type]
    )
    made = optimizers(
        model, lr=0.05, adamw_lr=1e-2, weight_decay=0.1, betas=(0.9, 0.999), show=False
    )
    schedules: Any = [get_scheduler("linear", one, 2, steps) for one in made]
    model, *prepared = accelerator.prepare(model, *made, *schedules)
    done = 0
    while done < steps:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(
                    model(**batch)["loss"], weight=torch.tensor(len(batch["labels"]))
                )
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                for one in prepared:
                    one.step()
                for one in prepared[: len(made)]:
                    one.zero_grad()
            done += accelerator.sync_gradients
            if done == steps:
                break
    accelerator.end_training()
    found = accelerator.get_state_dict(model)
    return [found[name].clone() for name in sorted(found)]


@ranks(1, 2)
def test_muon_is_the_loop_with_hasten_optimizers_and_resumes(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    where: str = ctx.world.broadcast_object(str(tmp_path))
    whole = muon(f"{where}/whole")
    whole.train()
    assert isinstance(whole.optimizer, OptimizerList)
    assert len(whole.optimizer.optimizers) == 2
    for ours, theirs in zip(
        weights_of(whole), by_hand(f"{where}/hand", 8), strict=True
    ):
        assert torch.equal(ours, theirs)
    again = muon(f"{where}/whole")
    again.train(resume_from_checkpoint=f"{where}/whole/checkpoints/checkpoint_0")
    for ours, theirs in zip(weights_of(again), weights_of(whole), strict=True):
        assert torch.equal(ours, theirs)


@ranks(2)
def test_muon_with_sharded_weights_is_the_replicated_one(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    where: str = ctx.world.broadcast_object(str(tmp_path))
    made = [
        muon(f"{where}/{words}", max_steps=4, fsdp=words)
        for words in ("", "full_shard")
    ]
    for one in made:
        one.train()
    sharded, replicated = weights_of(made[1]), weights_of(made[0])
    assert len(sharded) == (6 if ctx.rank == 0 else 0)  # gathered on the main process
    for ours, theirs in zip(sharded, replicated, strict=ctx.rank == 0):
        # sums in another order
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_logged_rate_is_that_of_adamw(tmp_path: Path) -> None:
    made = make_optimizer(
        TrainingArguments(
            str(tmp_path), optim="muon", learning_rate=0.25, adam_beta2=0.5
        ),
        Net(),
    )
    assert made.param_groups[0]["lr"] == 0.25
    assert made.param_groups[0]["betas"] == (0.9, 0.5)
    assert made.param_groups[-1]["lr"] == 0.02


class TinyLM(nn.Module):
    """Language model with one attention layer that keeps packed samples apart by their positions."""

    loss_type = "ForCausalLM"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(32, 8), nn.Embedding(64, 8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 32)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, labels: Tensor
    ) -> Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=packed_attention_mask(position_ids)
        )
        logits = self.head(x + out[:, 0])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def texts(count: int = 24) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 12, (count,), generator=draw).tolist()
    return [
        {"input_ids": torch.randint(1, 32, (length,), generator=draw).tolist()}
        for length in lengths
    ]


def packed(folder: str, model: nn.Module, **options: Any) -> Trainer:
    plain: dict[str, Any] = {
        "optim": "sgd",
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
    }
    args = TrainingArguments(
        folder,
        use_cpu=True,
        packing=True,
        per_device_train_batch_size=1,
        disable_tqdm=True,
        **{**plain, **options},
    )
    return Trainer(model, args, train_dataset=texts())


@ranks(1, 2)
def test_a_packed_update_is_that_of_the_samples(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    where: str = ctx.world.broadcast_object(str(tmp_path))
    trainer = packed(
        where,
        TinyLM(),
        max_length=26,
        gradient_accumulation_steps=100,
        num_train_epochs=1,
    )
    trainer.train()
    assert trainer.state.global_step == 1
    assert len(trainer.train_loader) * ctx.world.size == 6  # no pack is repeated
    model, total, count = TinyLM(), torch.zeros(()), 0
    for text in texts():
        tokens = torch.tensor([text["input_ids"]])
        places = torch.arange(tokens.shape[1])[None]
        total = total + model(tokens, places, tokens) * (tokens.shape[1] - 1)
        count += tokens.shape[1] - 1
    torch.autograd.backward(total / count)
    trained = trainer.accelerator.unwrap_model(trainer.wrapped_model).parameters()
    for ours, theirs in zip(trained, model.parameters(), strict=True):
        assert theirs.grad is not None
        # sums in another order
        torch.testing.assert_close(
            ours, theirs - 0.5 * theirs.grad, rtol=1e-5, atol=1e-6
        )


def test_packing_and_the_chunked_loss_with_a_model_of_transformers(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")

    def trained(name: str, **options: Any) -> list[Tensor]:
        sizes = {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=32, **sizes)
        )
        trainer = packed(
            str(tmp_path / name),
            model,
            num_train_epochs=1,
            gradient_accumulation_steps=100,
            **options,
        )
        trainer.train()
        return weights_of(trainer)

    alone = trained("alone", max_length=12)
    for options in ({"max_length": 30}, {"max_length": 12, "use_chunked_loss": True}):
        for ours, theirs in zip(trained(str(options), **options), alone, strict=True):
            # sums in another order
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"muon_learning_rate": 0.1}, "set optim='muon'"),
        ({"optim": "muon", "adam_epsilon": 1e-6}, "only Adam takes it"),
        ({"max_length": 8}, "set packing=True"),
        (
            {"packing": True, "per_device_train_batch_size": 1},
            "set it to the number of tokens",
        ),
        (
            {"packing": True, "max_length": 8},
            "per_device_train_batch_size=8 would have no effect; set it to 1",
        ),
        (
            {
                "packing": True,
                "max_length": 8,
                "per_device_train_batch_size": 1,
                "group_by_length": True,
            },
            "remove one of them",
        ),
    ],
)
def test_arguments_without_effect_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingArguments("out", **options)


def test_models_that_cannot_be_packed_are_refused(tmp_path: Path) -> None:
    class Unmasked(nn.Module):
        loss_type = "ForCausalLM"

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            raise NotImplementedError

    with pytest.raises(
        ConfigError,
        match="takes no position_ids, so the samples would attend to each other",
    ):
        packed(str(tmp_path), Unmasked(), max_length=8)
    with pytest.raises(ConfigError, match="compares each position with its own label"):
        packed(str(tmp_path), Net(), max_length=8)
