"""Training through torch_xla equals plain torch, on one device and on several that share each batch, and resumes bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hasten import Accelerator, DataLoaderConfiguration, set_seed
from hasten.errors import DeviceError, NumbersError, PrecisionError
from hasten.extensions.xla.placing import Devices
from hasten.optional import need
from tests.xla.training import Run, assert_equal, net, parts_of, plain

# compiling takes most of the time: 90 s for a test that gets a seventh of a core
pytestmark = pytest.mark.timeout(400)

STEPS: Final = 20
ROWS: Final = 8
FP32: Final = 2e-6
"""The order of sums differs between XLA's kernels and torch's; 20 steps of AdamW stay within this."""
BF16: Final = 0.1
"""Losses begin at 6, and bf16 keeps 8 bits; torch's own bf16 on the CPU differs from fp32 by up to 0.05 here."""


def samples(count: int = STEPS * ROWS) -> TensorDataset:
    """Classes that follow from the input."""
    x = torch.arange(count) * 7 % 10
    return TensorDataset(x, (x * 3 + 1) % 10)


def plain_losses(
    every: int, clip: float | None, data: TensorDataset
) -> tuple[list[float], nn.Module]:
    """Losses and weights of plain torch, batch by batch."""
    model = net()
    x, y = data.tensors
    steps = [
        [list(range(start, min(start + ROWS, len(data))))]
        for start in range(0, len(data), ROWS)
    ]
    return plain(model, (x, y), steps, every, clip), model


# Any: arguments of Run.made
def made(data: Dataset[Any], *args: Any, dropout: float = 0.0, **options: Any) -> Run:
    """A training on batches of `ROWS`, prepared."""
    return Run.made(net(dropout=dropout), data, ROWS, *args, **options)


def compiled() -> int:
    """Programs compiled so far."""
    data = need("torch_xla.debug.metrics").metric_data("CompileTime")
    return 0 if data is None else int(data[0])


@pytest.fixture(autouse=True)
def finished() -> Iterator[None]:
    """Run what a test left recorded, so that it does not become part of the next one's program."""
    yield
    need("torch_xla").sync()


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("every", [1, 3])
def test_equals_plain_torch(every: int, clip: float | None, shards: bool) -> None:
    data = samples()
    expected_losses, reference = plain_losses(every, clip, data)
    run = made(data, every, clip, shards=shards).train()
    assert [float(loss) for loss in run.losses] == pytest.approx(
        expected_losses, abs=FP32
    )
    for name, value in reference.state_dict().items():
        if name == "norm.running_var":
            continue  # see test_batch_norm_keeps_the_biased_variance
        torch.testing.assert_close(
            run.model.state_dict()[name].cpu(), value, atol=2e-5, rtol=0, msg=name
        )
    assert run.accelerator.num_processes == 1


@pytest.mark.parametrize("every", [1, 3])
def test_bf16_follows_plain_torch(every: int) -> None:
    data = samples()
    expected_losses, _ = plain_losses(every, 0.5, data)
    run = made(data, every, 0.5, "bf16").train()
    assert [float(loss) for loss in run.losses] == pytest.approx(
        expected_losses, abs=BF16
    )
    assert run.model.embed.weight.dtype == torch.float32
    assert any(
        abs(float(loss) - expected_loss) > FP32
        for loss, expected_loss in zip(run.losses, expected_losses, strict=True)
    ), "nothing in bf16"


def test_batch_norm_keeps_the_biased_variance() -> None:
    """torch_xla's own way, told in docs/tpu.md: torch multiplies by n / (n - 1) what it remembers for evaluation."""
    accelerator = Accelerator(strategy="xla")
    norm, reference = (
        accelerator.prepare_model(nn.BatchNorm1d(3, momentum=1.0)),
        nn.BatchNorm1d(3, momentum=1.0),
    )
    x = torch.randn(ROWS, 3)
    torch.testing.assert_close(
        norm(x.to(accelerator.device)).cpu(), reference(x), atol=1e-5, rtol=0
    )
    assert reference.running_var is not None
    torch.testing.assert_close(
        norm.running_var.cpu(), reference.running_var * (ROWS - 1) / ROWS
    )


def test_a_last_batch_that_devices_cannot_share() -> None:
    data = samples(STEPS * ROWS - 3)
    expected_losses, _ = plain_losses(1, None, data)
    run = made(data).train()
    assert [float(loss) for loss in run.losses] == pytest.approx(
        expected_losses, abs=FP32
    )


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(
    ("every", "stop", "shards"),
    [
        (every, stop, shards)
        for every, stop in ((1, 9), (3, 9), (3, 10))
        for shards in (False, True)
    ],
)
def test_resumes_bit_for_bit(
    every: int, stop: int, shards: bool, dropout: float, tmp_path: Path
) -> None:
    """Also in the middle of an epoch and of an accumulation window, with dropout."""
    first_run, resumed_run = resumed(every, stop, shards, dropout, tmp_path)
    assert [float(loss) for loss in resumed_run.losses] == [
        float(loss) for loss in first_run.losses[stop:]
    ]
    assert_equal(resumed_run.numbers(), first_run.numbers())


def resumed(
    every: int, stop: int, shards: bool, dropout: float, folder: Path
) -> tuple[Run, Run]:
    """A training that saved on its way, and another that went on from there."""
    set_seed(3)
    first_run = made(samples(), every, 0.5, shards=shards, dropout=dropout).train(
        stop, folder / "saved"
    )
    set_seed(99)
    resumed_run = made(samples(), every, 0.5, shards=shards, dropout=dropout)
    resumed_run.accelerator.load_state(folder / "saved")
    return first_run, resumed_run.train()


def test_saving_changes_no_later_draw(tmp_path: Path) -> None:
    set_seed(3)
    saved = made(samples(), dropout=0.2).train(9, tmp_path / "saved")
    set_seed(3)
    unsaved = made(samples(), dropout=0.2).train()
    assert [float(loss) for loss in saved.losses] == [
        float(loss) for loss in unsaved.losses
    ]


def test_parameters_and_moments_are_sharded_and_stay_so(tmp_path: Path) -> None:
    spec = need("torch_xla")._XLAC._get_xla_sharding_spec
    count = Devices.all().count
    run = made(samples(), shards=True).train(9, tmp_path / "saved")
    run.accelerator.load_state(tmp_path / "saved")
    fresh = made(samples(), shards=True)
    fresh.accelerator.load_state(tmp_path / "saved")
    for sharded_run in (run.train(), fresh):
        for name, parameter in sharded_run.model.named_parameters():
            for tensor in (
                parameter,
                sharded_run.optimizer.state[parameter]["exp_avg"],
            ):
                shared = f"{count}]" in spec(tensor) or f"[{count}," in spec(tensor)
                assert shared == (count > 1), (name, spec(tensor))
    unsharded_run = made(samples()).train()
    assert all(
        "devices" not in spec(parameter)
        for parameter in unsharded_run.model.parameters()
    )


def test_batches_are_divided_over_the_devices() -> None:
    spec = need("torch_xla")._XLAC._get_xla_sharding_spec
    count = Devices.all().count
    accelerator = Accelerator(strategy="xla")
    loader = accelerator.prepare(DataLoader(samples(20), batch_size=ROWS))
    shared = ["devices" in spec(x) for x, _ in loader]
    assert shared == [count > 1, count > 1, count > 1 and 4 % count == 0]


def test_ties_attributes_and_groups_survive_the_move() -> None:
    accelerator = Accelerator(strategy="xla")
    model = net()
    model.embed.weight.mark = "kept"  # type: ignore[attr-defined]
    groups: list[dict[str, Any]] = [
        {"params": [model.embed.weight], "lr": 0.5},
        {"params": model.blocks.parameters()},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    moved, prepared = accelerator.prepare(model, optimizer)
    assert moved.head.weight is moved.embed.weight
    assert moved.embed.weight.mark == "kept"
    assert moved.embed.weight.device.type == "xla"
    assert prepared.param_groups[0]["params"][0] is moved.embed.weight
    assert [len(group["params"]) for group in prepared.param_groups] == [1, 4]


def test_a_step_is_compiled_once() -> None:
    """Neither the step's number, nor the learning rate, nor the watch over losses makes another program."""
    run = made(samples(), every=2, clip=0.5)
    counts = []
    for x, y in run.loader:
        with run.accelerator.accumulate(run.model):
            run.accelerator.backward(nn.functional.cross_entropy(run.model(x), y))
            run.accelerator.clip_grad_norm_(run.model.parameters(), 0.5)
            run.optimizer.step()
            run.schedule.step()
            run.optimizer.zero_grad()
        counts.append(compiled())
    run.accelerator.end_training()
    assert counts[6] == counts[-1], counts


@pytest.mark.parametrize("sets_seed_first", [True, False])
def test_dropout_follows_the_seed(sets_seed_first: bool) -> None:
    """Whether it is set before the Accelerator is made or afterwards."""
    drawn = []
    for seed in (1, 2, 1):
        if sets_seed_first:
            set_seed(seed)
        accelerator = Accelerator(strategy="xla")
        if not sets_seed_first:
            set_seed(seed)
        drawn.append(
            nn.functional.dropout(torch.ones(64, device=accelerator.device)).cpu()
        )
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


class Rows(Dataset[dict[str, Any]]):
    """Samples with tensors, a name and a number that stays on the host."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "x": torch.tensor(index % 10),
            "name": str(index),
            "index": torch.tensor(index),
        }


def test_metrics_see_every_sample_once() -> None:
    accelerator = Accelerator(
        strategy="xla",
        dataloader_config=DataLoaderConfiguration(prefetch_skip_keys=("index",)),
    )
    model, loader = accelerator.prepare(
        net().eval(), DataLoader(Rows(), batch_size=ROWS)
    )
    scores, names, indices = [], [], []
    with torch.no_grad():
        for batch in loader:
            assert batch["index"].device.type == "cpu"
            scores.append(accelerator.gather_for_metrics(model(batch["x"])).cpu())
            names += accelerator.gather_for_metrics(
                batch["name"], use_gather_object=True
            )
            indices += batch["index"].tolist()
    assert names == [str(number) for number in range(21)]
    assert indices == list(range(21))
    expected_scores = net().eval()(torch.arange(21) % 10).detach()
    torch.testing.assert_close(torch.cat(scores), expected_scores, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shards", [False, True])
def test_whole_weights_come_out_and_go_in(shards: bool, tmp_path: Path) -> None:
    run = made(samples(40), shards=shards).train()
    run.accelerator.save_model(run.model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    state = run.accelerator.get_state_dict(run.model)
    assert_equal(saved, {name: value.cpu() for name, value in state.items()})
    reloaded = made(samples(40), shards=shards)
    reloaded.accelerator.load_model(reloaded.model, tmp_path)
    assert_equal(
        saved,
        {name: value.cpu() for name, value in reloaded.model.state_dict().items()},
    )
    twin: Any = copy.deepcopy(run.accelerator.unwrap_model(run.model))
    assert twin.head.weight is twin.embed.weight


def test_a_checkpoint_goes_on_elsewhere(tmp_path: Path) -> None:
    """What was saved on XLA devices is read on the CPU, without strategy='xla', by who accepts other random numbers there."""
    run = made(samples()).train(20, tmp_path / "saved")
    accelerator = Accelerator(cpu=True)
    model = net()
    prepared = accelerator.prepare(
        *parts_of(model), DataLoader(samples(), batch_size=ROWS)
    )
    with pytest.raises(
        DeviceError, match="captured on 'xla' and this process works on 'cpu'"
    ):
        accelerator.load_state(tmp_path / "saved")
    accelerator.load_state(tmp_path / "saved", strict=False)
    assert_equal(Run(accelerator, *prepared).numbers(), run.numbers())


def test_a_background_save_holds_the_numbers_of_its_moment(tmp_path: Path) -> None:
    run = made(samples(40)).train()
    saved_numbers = run.numbers()
    run.accelerator.save_state(tmp_path / "saved", blocking=False)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    run.accelerator.wait_for_saves()
    run.accelerator.load_state(tmp_path / "saved")
    assert_equal(run.numbers(), saved_numbers)


def test_a_loss_that_is_no_number_stops_the_run() -> None:
    run = made(samples(40), trust={"numbers": "stop"})
    x, y = next(iter(run.loader))
    loss = nn.functional.cross_entropy(run.model(x), y) * float("nan")
    run.accelerator.backward(loss)
    with pytest.raises(NumbersError):
        run.optimizer.step()


def test_fp16_is_refused() -> None:
    with pytest.raises(PrecisionError, match="Use mixed_precision='bf16' or 'no'"):
        Accelerator(strategy="xla", mixed_precision="fp16")
