"""A step on fake tensors keeps, computes and costs what a real one does; what cannot be planned ends in one sentence."""

from __future__ import annotations

import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hasten import Accelerator
from hasten.cli.main import main
from hasten.config import files
from hasten.errors import ConfigError
from hasten.extensions.planning.plan import report
from hasten.extensions.planning.plan.gpu_rules import use_gpu_rules
from hasten.extensions.planning.plan.hardware import KNOWN
from hasten.extensions.planning.plan.search import PlanRequest, search_layouts
from hasten.extensions.planning.plan.trace import trace_step
from hasten.extensions.planning.plan.traced import ModelTrace
from hasten.extensions.planning.plan.watch import StepWatch
from hasten.testing.toys import TinyLM, next_token_loss, seeded

LENGTH = 16


def net() -> TinyLM:
    return seeded(lambda: TinyLM(vocab=32, width=16, heads=2, depth=3, context=LENGTH))


def loop() -> None:
    """A plain training loop; planning never lets it reach its end."""
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    model = net()
    loader: DataLoader[Tensor] = DataLoader(
        [torch.zeros(LENGTH, dtype=torch.long)] * 8,  # type: ignore[arg-type]
        batch_size=4,
    )
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), loader
    )
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(next_token_loss(model(batch), batch))
            optimizer.step()
            optimizer.zero_grad()
    raise AssertionError("a planned loop does not end")


@pytest.fixture(scope="module")
def traced() -> ModelTrace:
    return trace_step(loop, "toy", ("no",))


def test_a_fake_step_keeps_what_a_real_one_keeps(traced: ModelTrace) -> None:
    model = net()
    batch = torch.zeros(1, LENGTH, dtype=torch.long)
    watch = StepWatch([model])
    with watch.track_modules(), use_gpu_rules(lambda *_: None), watch:
        next_token_loss(model(batch), batch).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    real = max(sum(alive[:2]) for alive in watch.measured.alive)
    variant = traced.find_variant("no", recompute=False)
    assert variant is not None
    planned = max(
        moment.activations.cost_of(1) + moment.copies.cost_of(1)
        for moment in variant.moments
    )
    assert planned == pytest.approx(real, rel=0.02)
    assert sum(line.cost_of(1) for line in variant.flops.values()) >= sum(
        watch.measured.flops.values()
    )


def test_the_trace_knows_the_model_and_its_optimizer(traced: ModelTrace) -> None:
    model = net()
    assert traced.num_parameters == sum(p.numel() for p in model.parameters())
    assert traced.num_blocks == 3
    assert traced.sequence == LENGTH
    assert traced.optimizer.states == (4, 4)
    assert 0 < traced.split_share < 1
    plain, recomputed = (
        traced.find_variant("no", recompute=False),
        traced.find_variant("no", recompute=True),
    )
    assert plain is not None
    assert recomputed is not None
    assert max(m.activations.slope for m in recomputed.moments) < max(
        m.activations.slope for m in plain.moments
    )
    assert sum(line.slope for line in recomputed.flops.values()) > sum(
        line.slope for line in plain.flops.values()
    )


def test_products_are_counted_as_they_are() -> None:
    def one_layer() -> None:
        accelerator = Accelerator()
        model: nn.Module = nn.Linear(8, 4, bias=False)
        loader: DataLoader[Tensor] = DataLoader([torch.zeros(8)] * 4, batch_size=2)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader
        )
        for batch in loader:
            accelerator.backward(model(batch).sum())
            optimizer.step()

    traced_step = trace_step(one_layer, "layer", ("no",))
    (variant,) = traced_step.variants
    assert variant.flops["fp32"].slope == 2 * 2 * 8 * 4, (
        "forward, and the gradient of the weights"
    )
    assert traced_step.optimizer.states == ()


@pytest.mark.parametrize("order", ["loader first", "one by one", "prepare_data_loader"])
def test_objects_may_be_prepared_in_any_order(order: str) -> None:
    def one_by_one() -> None:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        net: nn.Module = nn.Linear(8, 4, bias=False)
        updates: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loader: DataLoader[Tensor] = DataLoader([torch.zeros(8)] * 4, batch_size=2)  # type: ignore[arg-type]
        if order == "loader first":
            loader = accelerator.prepare(loader)
        net = accelerator.prepare(net)
        updates = accelerator.prepare(updates)
        if order == "one by one":
            loader = accelerator.prepare(loader)
        elif order == "prepare_data_loader":
            loader = accelerator.prepare_data_loader(loader)
        for batch in loader:
            with accelerator.accumulate(net):
                accelerator.backward(net(batch).sum())
                updates.step()

    (variant,) = trace_step(one_by_one, "layer", ("no",)).variants
    assert variant.flops["fp32"].slope == 2 * 2 * 8 * 4


def test_loops_that_never_train_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"never called Accelerator.prepare\(\) with a model"
    ):
        trace_step(lambda: None, "nothing")

    def without_data() -> None:
        raise FileNotFoundError("data/train.bin")

    with pytest.raises(
        ConfigError,
        match=r"stopped before its first batch.*FileNotFoundError: data/train.bin",
    ):
        trace_step(without_data, "empty")

    def asks_for_data() -> None:
        sys.exit("give --data")

    with pytest.raises(
        ConfigError, match=r"it ended, saying 'give --data'\. Run it directly"
    ):
        trace_step(asks_for_data, "asking")

    def with_a_wrong_setting() -> None:
        raise ConfigError("a sentence of hasten's own.")

    with pytest.raises(ConfigError, match=r"^a sentence of hasten's own\.$"):
        trace_step(with_a_wrong_setting, "wrong")


def test_a_model_of_a_script_takes_no_memory_while_it_is_built() -> None:
    """Not even for the tensors that its constructor makes: they are gone as soon as they are replaced."""
    parameter_references: list[weakref.ref[nn.Parameter]] = []

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            assert not any(
                reference() is not None for reference in parameter_references
            )
            weight = nn.Parameter(torch.empty(3))
            parameter_references.append(weakref.ref(weight))
            self.own = self.tied = weight

    def builds() -> None:
        several = [Wide() for _ in range(5)]
        assert all(wide.own is wide.tied and wide.own.is_meta for wide in several)
        assert len({id(wide.own) for wide in several}) == 5
        raise FileNotFoundError("reached")

    with pytest.raises(ConfigError, match="reached"):
        trace_step(builds, "wide")


def test_settings_that_the_script_fixes_are_named(traced: ModelTrace) -> None:
    assert dict(traced.script_settings) == {
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 4,
    }
    plan = search_layouts(
        traced,
        PlanRequest(
            gpus=2, accelerator=KNOWN["h100"], global_batch=8, precisions=("no",)
        ),
    )
    notes = "\n".join(report.list_notes(plan, plan.best))
    assert "remove mixed_precision='bf16' from the script's Accelerator()" in notes
    assert "remove gradient_accumulation_steps=4 from" in notes
    agreeing = replace(
        traced,
        script_settings=(
            ("mixed_precision", "no"),
            ("strategy", plan.best.candidate.strategy),
        ),
    )
    assert "take " not in "\n".join(
        report.list_notes(replace(plan, trace=agreeing), plan.best)
    )


def test_a_batch_that_cannot_be_split_is_refused(traced: ModelTrace) -> None:
    with pytest.raises(ConfigError, match="global batch 8 cannot be split over 3 GPUs"):
        search_layouts(
            traced,
            PlanRequest(
                gpus=3, accelerator=KNOWN["h100"], global_batch=8, precisions=("no",)
            ),
        )


@pytest.mark.parametrize(
    ("value", "shown"), [(0.000712, "0.71 ms"), (0.0707, "70.7 ms"), (1.19, "1.19 s")]
)
def test_times_are_shown_with_digits_that_tell_them_apart(
    value: float, shown: str
) -> None:
    assert report.format_seconds(value) == shown


def test_the_command_plans_a_script_and_writes_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport test_trace\ntest_trace.loop()\n"
    )
    out = tmp_path / "config.yaml"
    command = [
        "plan",
        str(script),
        "--gpus",
        "8",
        "--gpu",
        "h100",
        "--global-batch",
        "64",
        "-o",
        str(out),
    ]
    assert main(command) == 0
    num_parameters = sum(p.numel() for p in net().parameters())
    assert f"{num_parameters:,} parameters" in capsys.readouterr().out
    names = {entry.name: entry.value for entry in files.read(out).entries}
    assert names["launch.num_processes"] == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train.py", "--gpus", "8", "--gpu", "h1000", "--global-batch", "64"],
            "the accelerator",
        ),
        (
            ["absent.py", "--gpus", "8", "--gpu", "h100", "--global-batch", "64"],
            "'absent.py' does not exist",
        ),
        (
            ["builtins:int", "--gpus", "8", "--gpu", "h100", "--global-batch", "64"],
            "returns int; return the model",
        ),
        (
            ["no.such:thing", "--gpus", "8", "--gpu", "h100", "--global-batch", "64"],
            "cannot be built",
        ),
        (
            ["nothing", "--gpus", "8", "--gpu", "h100", "--global-batch", "64"],
            "neither a script",
        ),
        (
            ["x:y", "--gpus", "0", "--gpu", "h100", "--global-batch", "64"],
            "'0' is not an integer from 1",
        ),
        (
            [
                "x:y",
                "--gpus",
                "1",
                "--gpu",
                "h100",
                "--global-batch",
                "64",
                "--sequence",
                "3",
            ],
            "not an option",
        ),
    ],
)
def test_wrong_requests_end_in_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    error = [
        line
        for line in capsys.readouterr().err.splitlines()
        if not line.startswith("[hasten]")
    ]
    assert len(error) == 1
    assert message in error[0]
    assert ".." not in error[0]
