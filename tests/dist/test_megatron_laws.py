"""A Megatron engine trains as the transformers model does in one plain process: tensor, pipeline and data parallel.

megatron-core runs on the CPU through `megatron_on_cpu.py`, which stands in for the calls of torch.cuda; everything else is real.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hasten import Accelerator
from hasten.errors import CheckpointError, ConfigError, PrepareError, StepError
from hasten.optional import available
from hasten.runtime.context import ProcessContext
from hasten.strategies.megatron_engine import VERSIONS
from hasten.testing.pool import Pool, ranks

pytestmark = [
    pytest.mark.timeout(300),  # a worker imports transformers and megatron-core at its first test
    pytest.mark.skipif(
        not (available("megatron", VERSIONS) and available("transformers")),
        reason=f"megatron-core{VERSIONS} or transformers is not installed (pip install 'hasten[megatron]' transformers)",
    ),
]

SHIM: Final = Path(__file__).with_name("megatron_on_cpu.py")
STEPS: Final = 20
LONG: Final = 240.0
"""A worker imports transformers and megatron-core at its first test, which takes long on a busy machine."""
ROWS: Final = 8
LENGTH: Final = 12
VOCAB: Final = 33
"""Not divisible by 2: one tensor parallel rank holds rows that pad it."""
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "tp2": {"tp_degree": 2},
    "pp2": {"pp_degree": 2},
    "dp2": {},
    "shared": {"use_distributed_optimizer": True},
}
DATA: Final = ("dp2", "shared")
"""Layouts of two ranks that read different samples."""


def on_cpu() -> AbstractContextManager[None]:
    spec = importlib.util.spec_from_file_location("megatron_on_cpu", SHIM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    block: AbstractContextManager[None] = module.megatron_on_cpu()
    return block


def language_model(family: str, seed: int = 0, dropout: float = 0.0) -> Any:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(seed)
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2,
            n_embd=16,
            n_head=4,
            vocab_size=VOCAB,
            n_positions=LENGTH,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    )
    return transformers.LlamaForCausalLM(config)


def samples() -> list[dict[str, Tensor]]:
    """Sentences whose last two tokens are padding."""
    rng = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (4 * ROWS, LENGTH), generator=rng)
    mask, labels = torch.ones_like(tokens), tokens.clone()
    mask[:, -2:], labels[:, -2:] = 0, -100
    return [{"input_ids": t, "attention_mask": m, "labels": y} for t, m, y in zip(tokens, mask, labels, strict=True)]


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """`eps` is far above the rounding of gradients that are zero, such as those of the biases of keys."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def loss_of(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


class Run:
    """One training, step by step."""

    def __init__(self, accelerator: Accelerator, model: Any, split: int, by_hand: bool = False) -> None:
        self.accelerator, self.by_hand = accelerator, by_hand
        optimizer = optimizer_of(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step / 10))
        loader: DataLoader[Any] = DataLoader(samples(), batch_size=ROWS // split)  # type: ignore[arg-type]
        self.model, self.optimizer, self.schedule, self.loader = accelerator.prepare(model, optimizer, schedule, loader)
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

    def __init__(self, family: str, steps: int, every: int = 1) -> None:
        self.model = language_model(family)
        self.losses: list[float] = []
        self.norms: list[float] = []
        optimizer = optimizer_of(self.model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step / 10))
        batches = list(DataLoader(samples(), batch_size=ROWS))  # type: ignore[arg-type]
        for number in range(1, steps + 1):
            loss = loss_of(self.model, batches[(number - 1) % len(batches)])
            (loss / every).backward()  # type: ignore[no-untyped-call]
            self.losses.append(float(loss.detach()))
            if number % every == 0:
                self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.4)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()


def logits_of(model: Any) -> Tensor:
    batch = next(iter(DataLoader(samples(), batch_size=ROWS)))  # type: ignore[arg-type]
    model.eval()
    with torch.no_grad():
        found: Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return found


def assert_trains_alike(
    ctx: ProcessContext, family: str, layout: dict[str, Any], folder: Path, by_hand: bool = False
) -> None:
    """Losses, norms, weights and logits of 20 steps in windows of two.

    fp32: the sums of a step have another order, over 20 steps of Adam.
    """
    split = ctx.world.size // (layout.get("tp_degree", 1) * layout.get("pp_degree", 1))
    with on_cpu():
        accelerator = engine(layout, gradient_accumulation_steps=2)
        run = Run(accelerator, language_model(family, seed=0 if ctx.rank == 0 else 5), split, by_hand)
        run.steps(STEPS)
        logits = logits_of(run.model)
        weights = accelerator.get_state_dict(run.model)
        accelerator.save_model(run.model, folder)
        run.model.config.save_pretrained(folder)
        accelerator.wait_for_everyone()
    plain = Plain(family, STEPS, every=2)
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(plain.losses), rtol=0, atol=2e-5)
    torch.testing.assert_close(torch.tensor(run.norms), torch.tensor(plain.norms), rtol=0, atol=5e-5)
    expected = plain.model.state_dict()
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-4, msg=name)
    torch.testing.assert_close(logits, logits_of(plain.model), rtol=0, atol=2e-4)
    again = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits_of(again), logits, rtol=0, atol=2e-6)
    for name, value in again.state_dict().items():
        assert torch.equal(value, weights[name]), name


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
    assert_trains_alike(ctx, family, LAYOUTS[layout], tmp_path)


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
    assert_trains_alike(ctx, family, layout, tmp_path)


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
    assert_trains_alike(ctx, "gpt2", layout, tmp_path, by_hand=True)


# ---------------------------------------------------------------- precision and checkpoints


@pytest.mark.exhaustive
@ranks(2, timeout_s=LONG)
def test_bf16_keeps_masters(ctx: ProcessContext) -> None:
    """Weights of 16 bits beside float32 masters: the curve is that of fp32 up to the rounding of weights."""
    with on_cpu():
        run = Run(engine({"tp_degree": 2}, mixed_precision="bf16"), language_model("llama"), 1)
        run.steps(8)
        assert {p.dtype for p in run.model.parameters()} == {torch.bfloat16}
        masters = [v["master"].data.dtype for v in run.optimizer.state_dict()["state"].values()]
    assert set(masters) == {torch.float32}
    plain = Plain("llama", 8)
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(plain.losses), rtol=0, atol=3e-2)
    assert run.losses != plain.losses


@pytest.mark.exhaustive
@ranks(2, timeout_s=LONG)
@pytest.mark.parametrize(
    ("layout", "precision"), [("tp2", "no"), ("pp2", "bf16"), ("dp2", "no"), ("shared", "no"), ("shared", "bf16")]
)
def test_a_run_goes_on_bit_for_bit(ctx: ProcessContext, tmp_path: Path, layout: str, precision: str) -> None:
    """Also with dropout, whose random numbers depend on the seed, the batch and the place alone."""
    assert_goes_on(LAYOUTS[layout], precision, 2 if layout in DATA else 1, tmp_path)


@pytest.mark.exhaustive
@ranks(4, timeout_s=LONG)
def test_shares_of_tensor_parallel_ranks_go_on_bit_for_bit(ctx: ProcessContext, tmp_path: Path) -> None:
    assert_goes_on({"tp_degree": 2, "use_distributed_optimizer": True}, "bf16", 2, tmp_path)


def assert_goes_on(layout: dict[str, Any], precision: str, split: int, folder: Path) -> None:
    """A run that is saved and loaded goes on as the one that was not interrupted. Ranks: every rank."""
    with on_cpu():
        first = Run(engine(layout, mixed_precision=precision), language_model("gpt2", dropout=0.2), split)
        first.steps(4)
        first.accelerator.save_state(folder / "state")
        first.losses.clear()
        first.steps(4)
        torch.manual_seed(77)
        other = language_model("gpt2", seed=3, dropout=0.2)
        second = Run(engine(layout, mixed_precision=precision), other, split)
        second.steps(2)  # state that loading must replace
        second.losses.clear()
        second.accelerator.load_state(folder / "state")
        second.steps(4)
        assert second.losses == first.losses
        for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
            assert torch.equal(a, b)


def save_some(ctx: ProcessContext, folder: Path, layout: str) -> list[float]:
    with on_cpu():
        run = Run(engine(LAYOUTS[layout]), language_model("gpt2"), 2 if layout in DATA else 1)
        run.steps(4)
        run.accelerator.save_state(folder / "state")
        run.accelerator.save_model(run.model, folder / "weights")
        run.steps(8)
        return run.losses[4:]


def load_some(ctx: ProcessContext, folder: Path, layout: str) -> list[float]:
    with on_cpu():
        run = Run(engine(LAYOUTS[layout]), language_model("gpt2", seed=4), 2 if layout in DATA else 1)
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
    with on_cpu():
        accelerator = engine({"pp_degree": 2}, gradient_accumulation_steps=2)
        net = torch.nn.Linear(2, 2)
        with pytest.raises(PrepareError, match="only known architectures can be trained: gpt2, llama"):
            accelerator.prepare(net, torch.optim.SGD(net.parameters()))
        frozen = language_model("gpt2")
        frozen.transformer.wpe.requires_grad_(False)
        with pytest.raises(PrepareError, match="takes gradients, but the optimizer does not hold it"):
            accelerator.prepare(frozen, torch.optim.SGD(frozen.transformer.wte.parameters()))
        run = Run(accelerator, language_model("gpt2"), 1)
        batch = next(iter(DataLoader(samples(), batch_size=ROWS)))  # type: ignore[arg-type]
        with pytest.raises(StepError, match="call the model under"):
            run.model(**batch)
        with pytest.raises(StepError, match="forward_backward"):
            accelerator.backward(torch.ones((), requires_grad=True))
        with torch.no_grad(), pytest.raises(StepError, match="would ignore"):
            run.model(**batch, inputs_embeds=torch.ones(1))
        other = language_model("gpt2")
        with pytest.raises(PrepareError, match="one model with one optimizer"):
            accelerator.prepare(other, optimizer_of(other))
        run.steps(1)
        with pytest.raises(CheckpointError, match="middle of an accumulation window"):
            accelerator.save_state(tmp_path / "state")
        with pytest.raises(StepError, match=r"Pass model.parameters\(\)"):
            accelerator.strategy.clip_norm(list(run.model.parameters())[:1], 1.0, 2.0)
        with pytest.raises(StepError, match="leave norm_type out"):
            accelerator.strategy.clip_norm(list(run.model.parameters()), 1.0, 1.0)
        model = language_model("gpt2")
        with pytest.raises(ConfigError, match="one layout per process"):
            engine({"tp_degree": 2}).prepare(model, optimizer_of(model))


@ranks(2, timeout_s=LONG)
def test_shares_of_the_optimizer_state_are_refused_where_they_do_not_fit(ctx: ProcessContext, tmp_path: Path) -> None:
    with on_cpu():
        model = language_model("gpt2")
        with pytest.raises(PrepareError, match="shares the state of Adam and AdamW only"):
            engine(LAYOUTS["shared"]).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run = Run(engine(LAYOUTS["shared"]), language_model("gpt2"), 2)
        run.steps(1)
        held = [slot for slot in run.optimizer.state_dict()["state"].values() if slot["exp_avg"].data.numel()]
        everyone = ctx.world.all_gather_object(sum(slot["exp_avg"].data.numel() for slot in held))
        assert sum(everyone) == sum(p.numel() for p in run.model.parameters())
        assert max(everyone) < 0.6 * sum(everyone)  # each rank keeps its share of the moments
        run.accelerator.save_state(tmp_path / "state")
        whole = Run(engine(LAYOUTS["dp2"]), language_model("gpt2"), 2)
        with pytest.raises(CheckpointError, match="use_distributed_optimizer=True, and this run has False"):
            whole.accelerator.load_state(tmp_path / "state")
