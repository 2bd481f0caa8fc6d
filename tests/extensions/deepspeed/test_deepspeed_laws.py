"""DeepSpeed's engines train as DDP does: every ZeRO stage, precision and window, on one process and on several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from hasten import Accelerator, DummyOptim, DummyScheduler
from hasten.errors import PrepareError, StepError
from hasten.extensions.deepspeed.engine import VERSIONS
from hasten.optional import available, need
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool, ranks

PRELOAD: Final = ("deepspeed",)

pytestmark = pytest.mark.skipif(
    not available("deepspeed", VERSIONS),
    reason=f"deepspeed{VERSIONS} is not installed (pip install 'hasten[deepspeed]')",
)

STEPS: Final = [9, pytest.param(20, marks=pytest.mark.exhaustive)]
"""Two epochs of four steps and one step more, or five epochs."""
SMALL: Final = {"reduce_bucket_size": 1000, "stage3_param_persistence_threshold": 8}
"""Buckets that hold less than the model, and a bias that ZeRO-3 keeps whole."""


def samples(length: int = 32) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(length, 6, generator=rng)
    return list(zip(x, torch.sin(x.sum(1, keepdim=True)), strict=True))


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 7), nn.Tanh(), nn.Linear(7, 1)
    )


def engine(stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "strategy": "deepspeed",
        "deepspeed_plugin": {
            "hf_ds_config": {"zero_optimization": {"stage": stage, **SMALL, **zero}}
        },
    }


class Run:
    """One training, step by step; the script is the same for every strategy."""

    def __init__(
        self, accelerator: Accelerator, clip: float | None = None, length: int = 32
    ) -> None:
        self.accelerator, self.clip = accelerator, clip
        model = net()
        groups = [
            {
                "params": [p for p in model.parameters() if p.ndim > 1],
                "weight_decay": 0.1,
            },
            {
                "params": [p for p in model.parameters() if p.ndim == 1],
                "weight_decay": 0.0,
            },
        ]
        optimizer = torch.optim.AdamW(groups, lr=2e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1.0 / (1 + step / 10)
        )
        loader: DataLoader[Any] = DataLoader(samples(length), batch_size=4)  # type: ignore[arg-type]
        self.model, self.optimizer, self.schedule, self.loader = accelerator.prepare(
            model, optimizer, schedule, loader
        )
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.updates: list[int] = []

    def steps(self, number: int) -> None:
        done = 0
        while True:
            for x, y in self.loader:
                self.step(x, y)
                done += 1
                if done == number:
                    return

    def step(self, x: Tensor, y: Tensor) -> None:
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            loss = nn.functional.mse_loss(self.model(x), y)
            accelerator.backward(loss)
            if self.clip is not None:
                norm = accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.norms += [] if norm is None else [float(norm)]
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        self.losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        self.updates.append(self.optimizer.num_updates)

    @property
    def weights(self) -> Tensor:
        state = self.accelerator.get_state_dict(self.model)
        return torch.cat([value.float().flatten() for value in state.values()])


def trained(settings: dict[str, Any], steps: int, **kwargs: Any) -> Run:
    run = Run(Accelerator(**settings), **kwargs)
    run.steps(steps)
    return run


@ranks(2, exhaustive=(1,))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("steps", STEPS)
def test_every_stage_trains_like_ddp(
    ctx: ProcessContext, stage: int, steps: int
) -> None:
    """The windows of three do not divide the epoch: its last one is shorter, and its mean must be one all the same.

    fp32: sums in another order, over the steps of Adam. bf16: DDP rounds activations, an engine the weights as well.
    """
    for precision, tolerance in (("no", 2e-6), ("bf16", 3e-2)):
        for every in (1, 3):
            common = {
                "mixed_precision": precision,
                "gradient_accumulation_steps": every,
            }
            plain = trained(
                {**common, "strategy": "ddp" if ctx.world.size > 1 else "none"}, steps
            )
            by_engine = trained({**common, **engine(stage)}, steps)
            label = f"{precision}, accumulation {every}"
            assert by_engine.updates == plain.updates, label
            torch.testing.assert_close(
                torch.tensor(by_engine.losses),
                torch.tensor(plain.losses),
                rtol=0,
                atol=tolerance,
                msg=label,
            )
            torch.testing.assert_close(
                by_engine.weights, plain.weights, rtol=0, atol=tolerance, msg=label
            )


@ranks(2, exhaustive=(1,))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_loop_clips(ctx: ProcessContext, stage: int) -> None:
    """clip_grad_norm_ gives the norm that DDP gives, and what it clips to wins over DeepSpeed's own number."""
    common = {"gradient_accumulation_steps": 2}
    plain = trained(
        {**common, "strategy": "ddp" if ctx.world.size > 1 else "none"}, 8, clip=0.05
    )
    settings = engine(stage)
    settings["deepspeed_plugin"]["hf_ds_config"]["gradient_clipping"] = 1.0
    by_engine = trained({**common, **settings}, 8, clip=0.05)
    torch.testing.assert_close(
        torch.tensor(by_engine.norms), torch.tensor(plain.norms), rtol=1e-5, atol=1e-7
    )
    torch.testing.assert_close(by_engine.weights, plain.weights, rtol=0, atol=2e-6)
    engine_clips = engine(stage)
    engine_clips["deepspeed_plugin"]["hf_ds_config"]["gradient_clipping"] = 0.05
    torch.testing.assert_close(
        trained({**common, **engine_clips}, 8).weights, plain.weights, rtol=0, atol=2e-6
    )


@ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_to_the_cpu_changes_no_number(ctx: ProcessContext, stage: int) -> None:
    zero = {"offload_optimizer": {"device": "cpu"}} | (
        {"offload_param": {"device": "cpu"}} if stage == 3 else {}
    )
    common = {"gradient_accumulation_steps": 3}
    plain = trained({**common, "strategy": "ddp"}, 11, clip=0.5)
    by_engine = trained({**common, **engine(stage, **zero)}, 11, clip=0.5)
    torch.testing.assert_close(
        torch.tensor(by_engine.norms), torch.tensor(plain.norms), rtol=1e-5, atol=1e-7
    )
    torch.testing.assert_close(by_engine.weights, plain.weights, rtol=0, atol=2e-6)


# ---------------------------------------------------------------- overflow, several engines, placeholders


@contextmanager
def fp16_on_any_cpu() -> Iterator[None]:
    """Context manager in which DeepSpeed does not refuse fp16 on CPUs without fp16 instructions: torch computes it there too, slowly."""
    kind = type(need("deepspeed").accelerator.get_accelerator())
    with (
        mock.patch.object(kind, "is_fp16_supported", return_value=True),
        mock.patch.object(
            kind,
            "supported_dtypes",
            return_value=[torch.float32, torch.bfloat16, torch.float16],
        ),
    ):
        yield


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_overflow_skips_the_update_and_says_so(
    ctx: ProcessContext, stage: int
) -> None:
    with fp16_on_any_cpu():
        overflow(stage)


def overflow(stage: int) -> None:
    settings = engine(stage)
    scale = {
        "enabled": "auto",
        "initial_scale_power": 24,
        "hysteresis": 1,
        "loss_scale_window": 1000,
    }
    settings["deepspeed_plugin"]["hf_ds_config"]["fp16"] = scale
    run = Run(Accelerator(mixed_precision="fp16", **settings))
    initial_weights, rate = run.weights, run.schedule.get_last_lr()
    first = run.optimizer.optimizer.loss_scale
    run.steps(1)
    skipped = [run.accelerator.optimizer_step_was_skipped]
    assert run.optimizer.optimizer.loss_scale < first
    assert torch.equal(run.weights, initial_weights)
    assert run.schedule.get_last_lr() == rate, "a schedule follows updates"
    run.steps(24)
    skipped.append(run.accelerator.optimizer_step_was_skipped)
    assert skipped == [True, False]
    plain = trained({"strategy": "ddp"}, run.optimizer.num_updates)
    assert abs(min(run.losses) - min(plain.losses)) < 0.1


def gan(accelerator: Accelerator | None, rank: int, half: bool) -> list[float]:
    """Losses of a generator and a critic whose losses run through both."""
    torch.manual_seed(0)
    g: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    d: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    og, od = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (g, d))
    if accelerator is not None:
        g, od, d, og = accelerator.prepare(g, od, d, og)
    rng = torch.Generator().manual_seed(2)
    step_losses = []
    for _ in range(6):
        noise, real = (
            torch.randn(8, 4, generator=rng),
            torch.randn(8, 4, generator=rng) + 1,
        )
        if half:
            noise, real = noise.chunk(2)[rank], real.chunk(2)[rank]
        for optimizer, critic in ((od, True), (og, False)):
            optimizer.zero_grad()
            loss = d(g(noise)).tanh().mean()
            loss = loss - d(real).tanh().mean() if critic else -loss
            accelerator.backward(loss) if accelerator else loss.backward()
            optimizer.step()
            step_losses.append(
                float(
                    accelerator.reduce(loss.detach(), "mean")
                    if accelerator
                    else loss.detach()
                )
            )
    return step_losses


def two_engines(ctx: ProcessContext) -> None:
    for stage in (0, 1, 2, 3):
        engine_losses = torch.tensor(
            gan(Accelerator(**engine(stage)), ctx.rank, ctx.world.size > 1)
        )
        torch.testing.assert_close(
            engine_losses,
            torch.tensor(gan(None, 0, False)),
            rtol=0,
            atol=2e-6,
            msg=f"stage {stage}",
        )


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_two_engines_in_one_loss_train_as_plain_torch(count: int) -> None:
    """In processes of their own: ZeRO 2 adds gradients in the order autograd gives them, which depends on what ran before."""
    with Pool() as pool:
        pool.run(two_engines, count, timeout_s=110)


class Branching(nn.Module):
    """Uses its second branch only when told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, uses_both: bool) -> Tensor:
        out: Tensor = self.first(x)
        return out + self.second(x) if uses_both else out


@ranks(2)
def test_unused_parameters_and_two_losses_and_a_teacher(ctx: ProcessContext) -> None:
    """A parameter without a gradient is not updated by an old one; two backward() add up; a teacher needs no engine."""
    for stage in (0, 1, 2, 3):
        accelerator = Accelerator(**engine(stage))
        model, teacher, plain = Branching(), net().requires_grad_(False), Branching()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, teacher = accelerator.prepare(model, optimizer, teacher)
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(4):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            aim = teacher(torch.cat([x, x[:, :2]], 1)).detach()
            for smooth in (torch.square, torch.sin):
                accelerator.backward(smooth(model(x, step % 2 == 0) - aim).mean())
                # Any: torch leaves backward untyped
                reference_loss: Any = smooth(plain(x, step % 2 == 0) - aim).mean()
                reference_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            reference.step()
            reference.zero_grad()
        state = accelerator.get_state_dict(model)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(
                state[name], value, rtol=0, atol=1e-6, msg=f"stage {stage}: {name}"
            )


class Stumbling(nn.Module):
    """Blocks that are recomputed in backward; raises when told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        )

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        hidden = x
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        if fail:
            raise ValueError("stumbled")
        return hidden


@ranks(1, 2)
def test_zero_3_leaves_linear_layers_of_other_models_alone(ctx: ProcessContext) -> None:
    """DeepSpeed's linear function is in place while an engine computes, and at no other time."""
    torchs = functional.linear
    accelerator = Accelerator(**engine(3))
    model, plain = Stumbling(), Stumbling()
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    assert functional.linear is torchs
    with pytest.raises(ValueError, match="stumbled"), torch.no_grad():
        model(torch.ones(2, 4), fail=True)
    assert functional.linear is torchs
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    assert functional.linear is torchs
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    # Any: torch leaves backward untyped
    loss: Any = plain(torch.ones(2, 4)).square().mean()
    loss.backward()
    reference.step()
    for name, value in accelerator.get_state_dict(model).items():
        torch.testing.assert_close(
            value, plain.state_dict()[name], rtol=0, atol=1e-6, msg=name
        )


@ranks(2)
@pytest.mark.filterwarnings("ignore:.*the loss is nan:hasten.errors.HastenWarning")
def test_an_update_of_numbers_that_are_not_finite_is_skipped_on_every_rank(
    ctx: ProcessContext,
) -> None:
    """One rank's loss is nan; the weights stay on all, and the run goes on as if the batch had not been."""
    for stage in (0, 1, 2, 3):
        accelerator = Accelerator(trust={"numbers": "skip"}, **engine(stage))
        model, plain = Branching(), Branching()
        model, optimizer = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1)
        )
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(4):
            bad = torch.nan if step == 1 and ctx.rank == 1 else 1.0
            accelerator.backward(model(torch.ones(2, 4) * bad, True).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if step != 1:
                # Any: torch leaves backward untyped
                loss: Any = plain(torch.ones(2, 4), True).square().mean()
                loss.backward()
                reference.step()
                reference.zero_grad()
        for name, value in accelerator.get_state_dict(model).items():
            torch.testing.assert_close(
                value,
                plain.state_dict()[name],
                rtol=0,
                atol=1e-6,
                msg=f"stage {stage}: {name}",
            )


@ranks(2)
def test_placeholders_and_auto_values(ctx: ProcessContext) -> None:
    settings = engine(2)
    settings["deepspeed_plugin"]["hf_ds_config"] |= {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_num_steps": "auto",
                "warmup_max_lr": "auto",
                "warmup_type": "linear",
            },
        },
        "train_micro_batch_size_per_gpu": "auto",
    }
    accelerator = Accelerator(**settings)
    model, plain = net(), net()
    placeholder = DummyOptim(model.parameters(), lr=0.01, weight_decay=0.1)
    schedule: Any = DummyScheduler(placeholder, warmup_num_steps=4)
    model, placeholder, schedule = accelerator.prepare(model, placeholder, schedule)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)
    rates = []
    for step in range(6):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        accelerator.backward(model(x).square().mean())
        plain(x).square().mean().backward()
        reference.param_groups[0]["lr"] = placeholder.param_groups[0]["lr"]
        rates.append(placeholder.param_groups[0]["lr"])
        for optimizer in (placeholder, reference):
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    assert rates == sorted(rates)
    assert rates[0] < rates[-1] == 0.01
    actual_weights = torch.cat(
        [value.flatten() for value in accelerator.get_state_dict(model).values()]
    )
    torch.testing.assert_close(
        actual_weights,
        torch.cat([v.flatten() for v in plain.state_dict().values()]),
        rtol=0,
        atol=2e-6,
    )


@ranks(1)
def test_what_an_engine_cannot_do_is_refused(ctx: ProcessContext) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, **engine(2))
    model = net()
    with pytest.raises(PrepareError, match="one model with one optimizer"):
        accelerator.prepare(model, torch.optim.SGD(net().parameters(), lr=0.1))
    run = Run(accelerator)
    with pytest.raises(StepError, match="Call it once per model"):
        accelerator.clip_grad_norm_(list(run.model.parameters())[:1], 1.0)
    with pytest.raises(StepError, match=r"use clip_grad_norm_\(\)"):
        accelerator.clip_grad_value_(run.model.parameters(), 1.0)
    with pytest.raises(StepError, match="remove norm_type"):
        accelerator.clip_grad_norm_(run.model.parameters(), 1.0, norm_type=1.0)
    stepped = net()
    optimizer = torch.optim.AdamW(stepped.parameters(), lr=0.1)
    stepped(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    with pytest.raises(PrepareError, match=r"load the state with load_state\(\)"):
        accelerator.prepare(stepped, optimizer)
    with (
        pytest.raises(StepError, match="even_batches=True"),
        accelerator.join_uneven_inputs([run.model]),
    ):
        pass
    with pytest.raises(PrepareError, match="cannot be marked"):
        accelerator.mark_forward_method(run.model, "forward")
    run.steps(1)
    with pytest.raises(PrepareError, match="Use strategy='deepspeed'"):
        Accelerator().prepare(model, DummyOptim(model.parameters()))


# ---------------------------------------------------------------- checkpoints

State = dict[str, list[Tensor]]


def whole_state(run: Run) -> State:
    """Weights, master weights and Adam's moments of every parameter, gathered by DeepSpeed's own functions."""
    shown = need("deepspeed.utils")
    state = {
        name: [value.clone()]
        for name, value in run.accelerator.get_state_dict(run.model).items()
    }
    inner = run.accelerator.unwrap_model(run.model)
    zero = run.model.optimizer
    # DeepSpeed links the groups after the first one too early
    if hasattr(zero, "_hp_optimizer_states_linked"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()
    for name, parameter in inner.named_parameters():
        if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
            state[name].append(shown.safe_get_full_fp32_param(parameter).clone())
            state[name] += [
                shown.safe_get_full_optimizer_state(parameter, key).clone()
                for key in ("exp_avg", "exp_avg_sq")
            ]
    if run.optimizer.optimizer.stage == 0:
        saved = run.optimizer.state_dict()["state"]
        state["moments"] = [
            parameter_state[key].clone()
            for parameter_state in saved.values()
            for key in ("master", "exp_avg", "exp_avg_sq")
        ]
    return state


def fresh_run(stage: int, precision: str) -> Run:
    return Run(
        Accelerator(
            mixed_precision=precision, gradient_accumulation_steps=1, **engine(stage)
        )
    )


def save_some(
    ctx: ProcessContext, folder: Path, stage: int, precision: str
) -> tuple[State, list[float]]:
    """The state that was saved after five steps, and the losses of the six steps after it."""
    run = fresh_run(stage, precision)
    run.steps(5)
    run.accelerator.save_state(folder / "state")
    run.accelerator.save_model(run.model, folder / "weights")
    uninterrupted = fresh_run(stage, precision)
    uninterrupted.steps(11)
    return whole_state(run), uninterrupted.losses[5:]


def load_some(
    ctx: ProcessContext, folder: Path, stage: int, precision: str
) -> tuple[State, list[float], State]:
    """The state after loading, the losses of six steps more, and the weights of the exported model."""
    run = fresh_run(stage, precision)
    run.steps(2)  # state that loading must replace
    run.losses.clear()
    run.accelerator.load_state(folder / "state")
    state = whole_state(run)
    run.steps(6)
    exported = fresh_run(stage, precision)
    exported.accelerator.load_model(exported.model, folder / "weights")
    return state, run.losses, whole_weights(exported)


def whole_weights(run: Run) -> State:
    return {
        name: [value.clone()]
        for name, value in run.accelerator.get_state_dict(run.model).items()
    }


def assert_same(actual: State, expected: State, label: str) -> None:
    assert actual.keys() == expected.keys()
    for name, tensors in expected.items():
        assert len(actual[name]) == len(tensors)
        for number, (a, b) in enumerate(zip(actual[name], tensors, strict=True)):
            assert torch.equal(a, b), f"{label}: {name}, number {number}"


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (1, "no"),
        (3, "bf16"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in ((0, "bf16"), (2, "bf16"), (3, "no"))
        ),
    ],
)
def test_a_checkpoint_loads_on_any_number_of_processes(
    rank_pool: Pool, tmp_path: Path, stage: int, precision: str
) -> None:
    state, expected_losses = rank_pool.run(save_some, 2, tmp_path, stage, precision)[0]
    weights = {name: values[:1] for name, values in state.items() if name != "moments"}
    for world in (2, 1, 3):
        for loaded_state, losses, exported in rank_pool.run(
            load_some, world, tmp_path, stage, precision
        ):
            label = f"stage {stage}, {precision}, loaded on {world}"
            assert_same(loaded_state, state, label)
            assert_same(exported, weights, label)
            if world == 2:
                assert losses == expected_losses, label
