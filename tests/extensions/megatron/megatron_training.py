"""Trainings that the tests of Megatron engines compare: on an engine, and in plain torch in one process.

Test functions load this file where they run, because workers cannot import it by name. megatron-core runs on the CPU through
`megatron_on_cpu.py`, which stands in for the calls of torch.cuda; everything else is real.
"""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hasten import Accelerator
from hasten.runtime.context import ProcessContext

SHIM: Final = Path(__file__).with_name("megatron_on_cpu.py")
STEPS: Final = 20
ROWS: Final = 8
LENGTH: Final = 12
VOCAB: Final = 33
"""Not divisible by 2: one tensor parallel rank holds rows that pad it."""
TOKENS: Final[dict[str, Any]] = {
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "tp2": {"tp_degree": 2},
    "pp2": {"pp_degree": 2},
    "dp2": {},
    "shared": {"use_distributed_optimizer": True},
}
DATA: Final = ("dp2", "shared")
"""Layouts of two ranks that read different samples."""
ROPE: Final = {"rope_type": "default", "rope_theta": 1000.0}


def split_of(layout: str) -> int:
    """How many ranks read different samples in a layout of two."""
    return 2 if layout in DATA else 1


def on_cpu() -> AbstractContextManager[None]:
    spec = importlib.util.spec_from_file_location("megatron_on_cpu", SHIM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    block: AbstractContextManager[None] = module.megatron_on_cpu()
    return block


def language_model(
    family: str, seed: int = 0, dropout: float = 0.0, **changes: Any
) -> Any:
    """A small model of transformers, with weights of this seed."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(seed)
    wide = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
    }
    shape: dict[str, Any] = {
        "intermediate_size": 24,
        "max_position_embeddings": LENGTH,
        **wide,
        **TOKENS,
    }
    rotary = {
        **shape,
        "num_key_value_heads": 2,
        "rope_parameters": ROPE,
        "attention_dropout": dropout,
    }
    match family:
        case "gpt2":
            drops = {
                "resid_pdrop": dropout,
                "embd_pdrop": dropout,
                "attn_pdrop": dropout,
            }
            size = {
                "n_layer": 2,
                "n_embd": 16,
                "n_head": 4,
                "vocab_size": VOCAB,
                "n_positions": LENGTH,
            }
            return transformers.GPT2LMHeadModel(
                transformers.GPT2Config(**{**size, **TOKENS, **drops, **changes})
            )
        case "llama":
            return transformers.LlamaForCausalLM(
                transformers.LlamaConfig(**{**rotary, **changes})
            )
    raise AssertionError(family)


def samples(family: str = "gpt2") -> list[dict[str, Tensor]]:
    """Sentences whose last two tokens are padding."""
    rng = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (4 * ROWS, LENGTH), generator=rng)
    mask, labels = torch.ones_like(tokens), tokens.clone()
    mask[:, -2:], labels[:, -2:] = 0, -100
    columns = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    return [
        dict(zip(columns, row, strict=True))
        for row in zip(*columns.values(), strict=True)
    ]


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """`eps` is far above the rounding of gradients that are zero, such as those of the biases of keys."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def loss_of(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def samples_of(model: Any, padded: bool = True) -> list[dict[str, Tensor]]:
    """The samples for a model; without masks if nothing is to be `padded`."""
    all_samples = samples(model.config.model_type)
    return (
        all_samples
        if padded
        else [
            {k: v for k, v in sample.items() if k != "attention_mask"}
            for sample in all_samples
        ]
    )


class Run:
    """One training, step by step."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: Any,
        split: int,
        by_hand: bool = False,
        padded: bool = True,
    ) -> None:
        self.accelerator, self.by_hand = accelerator, by_hand
        optimizer = optimizer_of(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1.0 / (1 + step / 10)
        )
        loader: DataLoader[Any] = DataLoader(
            samples_of(model, padded),  # type: ignore[arg-type]
            batch_size=ROWS // split,
        )
        self.model, self.optimizer, self.schedule, self.loader = accelerator.prepare(
            model, optimizer, schedule, loader
        )
        self.losses: list[float] = []
        self.norms: list[float] = []

    def steps(self, number: int) -> None:
        done = 0
        while True:
            for batch in self.loader:
                self.step(batch)
                done += 1
                if done == number:
                    return

    def step(self, batch: Any) -> None:
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            if self.by_hand:
                loss = loss_of(self.model, batch)
                accelerator.backward(loss)
            else:
                loss = accelerator.forward_backward(self.model, batch, loss_of)
            norm = accelerator.clip_grad_norm_(self.model.parameters(), 0.4)
            self.norms += [] if norm is None else [float(norm)]
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        self.losses.append(float(accelerator.reduce(loss.detach(), "mean")))


def engine(layout: dict[str, Any], micro: int = 2, **settings: Any) -> Accelerator:
    plugin = {**layout, "num_micro_batches": micro}
    return Accelerator(strategy="megatron", megatron_lm_plugin=plugin, **settings)


class Plain:
    """What the transformers model does in plain torch, in one process."""

    def __init__(
        self,
        family: str,
        steps: int,
        every: int = 1,
        padded: bool = True,
        **changes: Any,
    ) -> None:
        self.model = language_model(family, **changes)
        self.losses: list[float] = []
        self.norms: list[float] = []
        optimizer = optimizer_of(self.model)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1.0 / (1 + step / 10)
        )
        batches = list(DataLoader(samples_of(self.model, padded), batch_size=ROWS))  # type: ignore[arg-type]
        for number in range(1, steps + 1):
            loss = loss_of(self.model, batches[(number - 1) % len(batches)])
            (loss / every).backward()  # type: ignore[no-untyped-call]
            self.losses.append(float(loss.detach()))
            if number % every == 0:
                self.norms.append(
                    float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.4))
                )
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()


def logits_of(model: Any) -> Tensor:
    """What a model says of the first batch, without its labels."""
    batch = next(iter(DataLoader(samples_of(model), batch_size=ROWS)))  # type: ignore[arg-type]
    batch.pop("labels")
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(**batch).logits
    return logits


def assert_trains_alike(
    ctx: ProcessContext,
    family: str,
    layout: dict[str, Any],
    folder: Path,
    by_hand: bool = False,
    padded: bool = True,
    **changes: Any,
) -> None:
    """Losses, norms, weights and logits of 20 steps in windows of two.

    fp32: the sums of a step have another order, over 20 steps of Adam.
    """
    inside = ("tp_degree", "pp_degree")
    split = (
        ctx.world.size // torch.Size([layout.get(name, 1) for name in inside]).numel()
    )
    with on_cpu():
        accelerator = engine(layout, gradient_accumulation_steps=2)
        model = language_model(family, seed=0 if ctx.rank == 0 else 5, **changes)
        run = Run(accelerator, model, split, by_hand, padded)
        run.steps(STEPS)
        logits = logits_of(run.model)
        weights = accelerator.get_state_dict(run.model)
        accelerator.save_model(run.model, folder)
        run.model.config.save_pretrained(folder)
        accelerator.wait_for_everyone()
    plain = Plain(family, STEPS, every=2, padded=padded, **changes)
    torch.testing.assert_close(
        torch.tensor(run.losses), torch.tensor(plain.losses), rtol=0, atol=2e-5
    )
    torch.testing.assert_close(
        torch.tensor(run.norms), torch.tensor(plain.norms), rtol=0, atol=5e-5
    )
    expected = plain.model.state_dict()
    assert weights.keys() == expected.keys(), weights.keys() ^ expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-4, msg=name)
    torch.testing.assert_close(logits, logits_of(plain.model), rtol=0, atol=2e-4)
    reloaded = importlib.import_module(
        "transformers"
    ).AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits_of(reloaded), logits, rtol=0, atol=2e-6)
    for name, value in reloaded.state_dict().items():
        assert torch.equal(value, weights[name]), name


def assert_goes_on(
    layout: dict[str, Any],
    precision: str,
    split: int,
    folder: Path,
    family: str = "gpt2",
) -> None:
    """A run that is saved and loaded goes on as the one that was not interrupted. Ranks: every rank."""
    with on_cpu():
        first = Run(
            engine(layout, mixed_precision=precision),
            language_model(family, dropout=0.2),
            split,
        )
        first.steps(4)
        first.accelerator.save_state(folder / "state")
        first.losses.clear()
        first.steps(4)
        torch.manual_seed(77)
        reseeded = language_model(family, seed=3, dropout=0.2)
        second = Run(engine(layout, mixed_precision=precision), reseeded, split)
        second.steps(2)  # state that loading must replace
        second.losses.clear()
        second.accelerator.load_state(folder / "state")
        second.steps(4)
        assert second.losses == first.losses
        for a, b in zip(
            first.model.parameters(), second.model.parameters(), strict=True
        ):
            assert torch.equal(a, b)


def save_some(
    folder: Path, layout: dict[str, Any], split: int, family: str
) -> list[float]:
    """Losses after a checkpoint and weights were written. Ranks: every rank."""
    with on_cpu():
        run = Run(engine(layout), language_model(family), split)
        run.steps(4)
        run.accelerator.save_state(folder / "state")
        run.accelerator.save_model(run.model, folder / "weights")
        run.steps(8)
        return run.losses[4:]


def load_some(
    folder: Path, layout: dict[str, Any], split: int, family: str
) -> list[float]:
    """Losses after the checkpoint was loaded, which holds the weights. Ranks: every rank."""
    with on_cpu():
        run = Run(engine(layout), language_model(family, seed=4), split)
        run.accelerator.load_model(run.model, folder / "weights")
        weights = run.accelerator.get_state_dict(run.model)
        run.accelerator.load_state(folder / "state")
        for name, value in run.accelerator.get_state_dict(run.model).items():
            assert torch.equal(value, weights[name]), name
        run.steps(8)
        return run.losses
