"""An evaluation anywhere changes nothing: a forward without gradients leaves training, averages, saves and loads bit for bit alike.

Each program runs twice with the same random choices, with and without evaluations between its calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hasten import Accelerator, ParallelismConfig
from hasten.config.sections.parallel import FullyShardedDataParallelPlugin
from hasten.errors import CheckpointError
from hasten.extensions.deepspeed.engine import VERSIONS
from hasten.optional import available
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool, ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded
from tests.support.toys import TINY_LM_PLAN, TinyMixture

VOCAB: Final = 16
LENGTH: Final = 8
ACCUMULATION: Final = 2
NUM_ACTIONS: Final = 8
Settings = dict[str, Any]  # Any: keywords of Accelerator


def sharded(**options: Any) -> Settings:
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(**options)}


def parallel(**sizes: Any) -> Settings:
    return {"parallelism_config": ParallelismConfig(**sizes)}


ON_ANY: Final = MappingProxyType[str, Settings](
    {
        "ddp": {"strategy": "ddp"},
        "fsdp": sharded(reshard_after_forward=True),
        "fsdp kept gathered": sharded(reshard_after_forward=False),
        "fsdp kept gathered in blocks": sharded(
            reshard_after_forward=False, transformer_cls_names_to_wrap=["Block"]
        ),
    }
)
ON_TWO: Final = MappingProxyType[str, Settings](
    {
        "tensor": parallel(tp_size=2, tp_plan=TINY_LM_PLAN),
        "context": parallel(cp_size=2),
        "experts": parallel(ep_size=2),
    }
)


class Program:
    """A random program of updates, averages, saves and loads, and what it computed."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        seed: int,
        evaluates: bool,
        mixture: bool = False,
    ) -> None:
        self.accelerator = Accelerator(
            gradient_accumulation_steps=ACCUMULATION, **settings
        )
        self._choices = random.Random(seed)
        self._evaluates = evaluates
        self._folder = folder / f"evaluates_{evaluates}"
        self._tokens = torch.Generator().manual_seed(seed)
        self._splits_sequences = self.accelerator.ctx.mesh.cp > 1
        self._knows_positions = not mixture
        model: nn.Module = (
            seeded(lambda: TinyMixture(vocab=VOCAB)) if mixture else tiny_lm()
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.average: Any = None  # Any: EMA, which engines do not support
        if settings.get("strategy") != "deepspeed":
            self.average = self.accelerator.ema(self.model, decay=0.5)
        self.numbers: list[float] = []
        self.tensors: dict[str, Tensor] = {}

    def run(self) -> None:
        """Run the program and read its last checkpoint."""
        saved: list[Path] = []
        for index in range(NUM_ACTIONS):
            match self._choices.choice(["update", "update", "swap", "save", "load"]):
                case "swap" if self.average is not None:
                    self._evaluate()
                    with self.average.swapped():
                        self._evaluate()
                        self.numbers.append(self._validation_loss())
                case "save":
                    saved.append(self._save(f"checkpoint_{index}"))
                case "load" if saved:
                    self._evaluate()
                    self.accelerator.load_state(saved[-1])
                case _:
                    self._update()
        last = self._save("last")
        self.accelerator.load_state(last)
        self._evaluate()
        self._update()
        self._save("after")
        for path in sorted(self._folder.rglob("*.safetensors")):
            for name, tensor in load_file(path).items():
                self.tensors[f"{path.relative_to(self._folder)} {name}"] = tensor

    def _update(self) -> None:
        for _ in range(ACCUMULATION):
            batch = self._batch()
            with self.accelerator.accumulate(self.model), self._split(batch):
                self._evaluate(batch)
                loss = self._loss(batch)
                self._evaluate(batch)
                self.accelerator.backward(loss)
                self._evaluate(batch)
                norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
                self._evaluate(batch)
                self.optimizer.step()
                self._evaluate(batch)
                self.optimizer.zero_grad()
            self._evaluate()
            self.numbers += [float(loss.detach()), 0.0 if norm is None else float(norm)]

    def _save(self, name: str) -> Path:
        self._evaluate()
        self.accelerator.save_state(self._folder / name)
        self._evaluate()
        return self._folder / name

    def _validation_loss(self) -> float:
        batch = self._batch()
        with torch.no_grad(), self._split(batch):
            return float(self._loss(batch))

    def _evaluate(self, batch: list[Tensor] | None = None) -> None:
        """Run a forward without gradients, or not: where and in which mode is chosen at random."""
        mode: Callable[[], AbstractContextManager[None]] = self._choices.choice(
            [torch.no_grad, torch.inference_mode]
        )
        is_chosen = self._choices.random() < 0.5
        if not (is_chosen and self._evaluates):
            return
        with mode():
            if batch is not None:
                self._loss(batch)
            else:
                tokens = torch.arange(2 * (LENGTH + 1)).reshape(2, LENGTH + 1) % VOCAB
                evaluation_batch = [
                    tokens[:, :-1].clone(),
                    tokens[:, 1:].clone(),
                    torch.arange(LENGTH).repeat(2, 1),
                ]
                with self._split(evaluation_batch):
                    self._loss(evaluation_batch)

    def _batch(self) -> list[Tensor]:
        tokens = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=self._tokens)
        return [
            tokens[:, :-1].clone(),
            tokens[:, 1:].clone(),
            torch.arange(LENGTH).repeat(2, 1),
        ]

    @contextmanager
    def _split(self, batch: list[Tensor]) -> Iterator[None]:
        splitting = (
            self.accelerator.context_parallel(batch, [1, 1, 1])
            if self._splits_sequences
            else nullcontext()
        )
        with splitting:
            yield

    def _loss(self, batch: list[Tensor]) -> Tensor:
        tokens, labels, positions = batch
        logits = (
            self.model(tokens, positions)
            if self._knows_positions
            else self.model(tokens)
        )
        return next_token_loss(logits.float(), labels)


def tiny_lm() -> nn.Module:
    return seeded(
        lambda: TinyLM(vocab=VOCAB, width=8, heads=2, depth=2, context=LENGTH)
    )


def check(
    ctx: ProcessContext,
    settings: Settings,
    folder: Path,
    seed: int,
    mixture: bool = False,
) -> None:
    programs = []
    for evaluates in (False, True):
        program = Program(settings, folder / str(seed), seed, evaluates, mixture)
        program.run()
        programs.append(program)
        ctx.world.barrier("the program has ended")
    without, with_evaluations = programs
    assert with_evaluations.numbers == without.numbers
    assert with_evaluations.tensors.keys() == without.tensors.keys()
    for name, tensor in without.tensors.items():
        assert torch.equal(with_evaluations.tensors[name], tensor), name


@ranks(1, 2, exhaustive=(3,))
@pytest.mark.parametrize("kind", ON_ANY)
def test_an_evaluation_changes_nothing(
    ctx: ProcessContext, tmp_path: Path, kind: str
) -> None:
    if ctx.world.size == 1 and kind == "ddp":
        for seed in range(2):
            check(ctx, {}, tmp_path, seed)
        return
    for seed in range(3):
        check(ctx, ON_ANY[kind], tmp_path, seed)


@ranks(2)
@pytest.mark.parametrize("kind", ON_TWO)
def test_an_evaluation_changes_nothing_on_a_mesh(
    ctx: ProcessContext, tmp_path: Path, kind: str
) -> None:
    for seed in range(2):
        check(ctx, ON_TWO[kind], tmp_path, seed, mixture=kind == "experts")


def deepspeed_program(ctx: ProcessContext, folder: Path, stage: int) -> None:
    plugin = {
        "hf_ds_config": {
            "zero_optimization": {
                "stage": stage,
                "stage3_param_persistence_threshold": 8,
            }
        }
    }
    check(
        ctx,
        {"strategy": "deepspeed", "deepspeed_plugin": plugin},
        folder / str(stage),
        0,
    )


@pytest.mark.skipif(
    not available("deepspeed", VERSIONS), reason=f"deepspeed{VERSIONS} is not installed"
)
def test_an_evaluation_changes_nothing_under_deepspeed(tmp_path: Path) -> None:
    with Pool() as pool:
        for stage in (1, 3):
            pool.run(deepspeed_program, 2, tmp_path, stage, timeout_s=110)


@ranks(1)
def test_a_save_refuses_parameters_that_no_model_holds(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    accelerator = Accelerator()
    model = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(CheckpointError, match="parameter group 1"):
        accelerator.save_state(tmp_path / "state")
