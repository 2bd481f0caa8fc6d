"""Streamed models compute what resident ones do, bit for bit: any order, errors in the middle, threads, training."""

from __future__ import annotations

import copy
import gc
import pickle
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten.errors import DeviceError, PrepareError
from hasten.extensions.bigmodel.dispatch import (
    cpu_offload,
    disk_offload,
    dispatch_model,
)
from hasten.extensions.bigmodel.placed import (
    PlacedForward,
    end_dispatch,
    move_tensors,
    streamers_of,
)
from hasten.extensions.bigmodel.tensors import remove_hook_from_submodules
from hasten.modules import forwarding


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = (
            nn.Linear(width, 3 * width),
            nn.Linear(3 * width, width, bias=False),
        )
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        assert isinstance(self.shift, Tensor)
        return {
            "x": x + scale * self.down(torch.relu(self.up(self.norm(x)))) + self.shift,
            "extra": [scale],
        }


class Model(nn.Module):
    """Blocks with keyword arguments and nested outputs, a parameter of its own, a shared head, and ways to leave early."""

    def __init__(self, depth: int = 6, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.start = nn.Parameter(torch.randn(width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(
        self, ids: Tensor, order: list[int] | None = None, fail_at: int | None = None
    ) -> Tensor:
        x = self.embed(ids) + self.start
        for index in range(len(self.blocks)) if order is None else order:
            if index == fail_at:
                raise ValueError("in the middle")
            x = self.blocks[index](x, scale=0.5)["x"]
        return torch.as_tensor(self.head(x))


def build(seed: int = 0, **settings: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**settings)


def on_cpu(model: Model, _: Path) -> nn.Module:
    return cpu_offload(model, "cpu")


def half_resident(model: Model, _: Path) -> nn.Module:
    return cpu_offload(model, "cpu", resident=4 * 5000)


def with_buffers(model: Model, _: Path) -> nn.Module:
    return cpu_offload(model, "cpu", offload_buffers=True)


def on_disk(model: Model, folder: Path) -> nn.Module:
    return disk_offload(model, folder, "cpu", offload_buffers=True)


def by_map(model: Model, folder: Path) -> nn.Module:
    device_map = {"embed": "cpu", "start": "disk", "head": "cpu", "blocks.0": "cpu"}
    return dispatch_model(
        model,
        {**device_map, **{f"blocks.{i}": "disk" for i in range(1, len(model.blocks))}},
        offload_dir=folder,
    )


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    """Let torch's kernels open what they keep open for the life of the process."""
    with torch.no_grad():
        nn.Linear(16, 48)(torch.zeros(3, 4, 16))


WAYS = (on_cpu, half_resident, with_buffers, on_disk, by_map)
IDS = torch.arange(12).view(3, 4)


@pytest.mark.parametrize("offload", WAYS)
def test_a_dispatched_model_refuses_to_be_moved_as_a_whole(
    offload: Any, tmp_path: Path
) -> None:
    model = offload(build(), tmp_path)
    for move in (lambda: model.to("cpu"), lambda: model.to(torch.float16), model.cuda):
        with pytest.raises(
            DeviceError, match=r"can't move a model .* remove_hook_from_submodules"
        ):
            move()
    remove_hook_from_submodules(model)
    assert not {"to", "cuda"} & vars(model).keys()


@pytest.mark.parametrize("offload", WAYS)
def test_outputs_equal_those_of_the_resident_model_in_any_order(
    offload: Callable[[Model, Path], nn.Module], tmp_path: Path
) -> None:
    reference, model = build(), build()
    offload(model, tmp_path)
    orders: list[list[int] | None] = [
        None,
        None,
        [0, 1],
        None,
        [5, 3, 1],
        [2, 2, 2],
        [0, 1],
        [0, 5],
        None,
        [],
    ]
    with torch.no_grad():
        for order in orders:
            assert torch.equal(model(IDS, order=order), reference(IDS, order=order)), (
                order
            )
    with torch.inference_mode():
        assert torch.equal(model(IDS), reference(IDS))
    assert torch.equal(model(IDS), reference(IDS))  # and with gradients enabled
    state, expected_state = model.state_dict(), reference.state_dict()
    assert state.keys() == expected_state.keys()
    assert all(
        torch.equal(state[name], expected_state[name]) for name in expected_state
    )
    assert model.head.weight is model.embed.weight
    end_dispatch(model)
    assert torch.equal(model(IDS), reference(IDS))


def test_a_map_to_one_device_moves_the_inputs_too() -> None:
    model = dispatch_model(nn.Identity(), {"": "meta"})
    placed = forwarding.find(model, forwarding.PLACED)
    assert isinstance(placed, PlacedForward)
    assert placed.inputs((IDS,), {})[0][0].is_meta
    on_host = dispatch_model(build(), {"": "cpu"})
    assert forwarding.find(on_host, forwarding.PLACED) is None, (
        "nothing can be elsewhere"
    )


@pytest.mark.parametrize("offload", [on_cpu, on_disk])
def test_an_error_in_the_middle_leaves_the_model_usable(
    offload: Callable[[Model, Path], nn.Module], tmp_path: Path
) -> None:
    reference, model = build(), build()
    offload(model, tmp_path)
    for block_index in (3, 0, 5):
        with pytest.raises(ValueError, match="in the middle"):
            model(IDS, fail_at=block_index)
        with pytest.raises(RuntimeError):
            model.blocks[block_index](torch.zeros(2, 5))
        assert torch.equal(model(IDS), reference(IDS))
    end_dispatch(model)


def test_threads_share_a_streamed_model() -> None:
    reference, model = build(), build()
    cpu_offload(model, "cpu")
    inputs = [torch.randint(32, (2, 3)) for _ in range(2)]
    wrong: list[int] = []

    def call(number: int) -> None:
        with torch.no_grad():
            for turn in range(15):
                order = None if (turn + number) % 3 else [turn % 6, 0]
                if not torch.equal(
                    model(inputs[number], order=order),
                    reference(inputs[number], order=order),
                ):
                    wrong.append(turn)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    end_dispatch(model)


def num_tensors() -> int:
    return sum(issubclass(type(tracked), Tensor) for tracked in gc.get_objects())


def test_memory_does_not_grow_over_fifty_forwards(tmp_path: Path) -> None:
    model = build(depth=8, width=128)
    disk_offload(model, tmp_path, "cpu")
    (streamer,) = streamers_of(model)
    total = sum(p.numel() * 4 for p in model.parameters())
    assert streamer.device_bytes < total * 5 / 8
    # of the turns up to the fiftieth, and up to the hundredth
    counts: dict[bool, list[int]] = {False: [], True: []}
    peaks = []
    gc.collect()
    # what is there already does not grow, and looking through it would take most of the time
    gc.freeze()
    try:
        with torch.no_grad():
            for turn in range(100):
                model(IDS, order=None if turn % 5 else [0, 3, 7])
                if turn % 50 >= 40:
                    assert streamer._thread is not None
                    # blocks that are on their way have arrived
                    streamer._thread.submit(int).result()
                    gc.collect()
                    counts[turn >= 50].append(num_tensors())
                if turn % 50 == 49:
                    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    finally:
        gc.unfreeze()
    end_dispatch(model)
    assert min(counts[False]) > 0, "tensors of the run are counted"
    assert median(counts[True]) <= median(counts[False])
    assert peaks[1] - peaks[0] < 20_000  # kB


class Adapted(nn.Module):
    """A frozen linear layer with a small trainable one beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = (
            nn.Linear(base.in_features, 2, bias=False),
            nn.Linear(2, base.out_features, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.base(x) + self.up(self.down(x)))


def adapted(model: Model) -> Model:
    model.requires_grad_(False)
    torch.manual_seed(5)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.up = Adapted(block.up)  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("offload", [on_cpu, on_disk])
def test_small_trainable_parts_train_on_a_streamed_base(
    offload: Callable[[Model, Path], nn.Module], tmp_path: Path
) -> None:
    """Gradients pass through weights that have left the device and come back for the backward."""
    reference, model = adapted(build()), build()
    offload(model, tmp_path)
    adapted(model)
    for trained_model in (reference, model):
        trained_model.train()
        optimizer = torch.optim.SGD(
            [p for p in trained_model.parameters() if p.requires_grad], lr=0.1
        )
        for _ in range(3):
            loss = (
                trained_model(IDS).square().mean()
                + trained_model(IDS, order=[0, 2]).square().mean()
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(reference.named_parameters(), model.named_parameters(), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    assert torch.equal(model(IDS), reference(IDS))
    end_dispatch(model)


def test_weights_written_to_while_they_rest_are_fetched_anew() -> None:
    reference, model = build(), build()
    cpu_offload(model, "cpu", resident=4 * 5000)
    for seed in (1, 2):
        model(IDS)
        fresh = build(seed).state_dict()
        reference.load_state_dict(fresh)
        model.load_state_dict(fresh)
        assert torch.equal(model(IDS), reference(IDS))
    end_dispatch(model)


class Weights(nn.Module):
    """Returns a view of its weight."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 8))
        self.inner = nn.Identity()

    def forward(self, count: int) -> Tensor:
        return self.weight[:count]


def test_outputs_that_are_views_of_weights_keep_their_values() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({str(i): Weights(4 + i) for i in range(8)})
    expected = [module(3).clone() for module in model.values()]
    cpu_offload(model, "cpu")
    with torch.no_grad():
        streamed_outputs = [module(3) for module in model.values()]
    assert all(
        torch.equal(a, b) for a, b in zip(streamed_outputs, expected, strict=True)
    )
    end_dispatch(model)


def test_modules_of_torch_that_reach_into_their_parts() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    recurrent, attention = nn.LSTM(8, 8, 2), nn.MultiheadAttention(8, 2)
    x, y = torch.randn(2, 5, 16), torch.randn(4, 2, 8)
    with torch.no_grad():
        expected = encoder(x), recurrent(y)[0], attention(y, y, y)[0]
        for module in (encoder, recurrent, attention):
            cpu_offload(module, "cpu")
        streamed_outputs = encoder(x), recurrent(y)[0], attention(y, y, y)[0]
    assert all(
        torch.equal(a, b) for a, b in zip(streamed_outputs, expected, strict=True)
    )
    for module in (encoder, recurrent, attention):
        end_dispatch(module)


def test_the_order_is_learned_and_copies_are_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build(depth=6)
    cpu_offload(model, "cpu")
    (streamer,) = streamers_of(model)
    fetched: list[str] = []
    fetch = type(streamer)._fetch_pack

    def counting(self: Any, pack: Any, state: Any) -> None:
        fetched.append(pack.name)
        fetch(self, pack, state)

    monkeypatch.setattr(type(streamer), "_fetch_pack", counting)
    with torch.no_grad():
        for _ in range(3):
            model(IDS, order=[0, 2, 4])
        fetched.clear()
        for _ in range(4):
            model(IDS, order=[0, 2, 4])
    # every forward fetches the three blocks it uses at most once, and never those it skips
    assert sum(name.startswith("blocks") for name in fetched) <= 4 * 3 + 3
    assert not {"blocks.1", "blocks.3", "blocks.5"} & set(fetched)
    end_dispatch(model)


def test_blocks_compile_and_a_streamed_model_refuses_to_be_pickled() -> None:
    reference, model = build(depth=3), build(depth=3)
    for block in model.blocks:
        block.compile(backend="eager")
    cpu_offload(model, "cpu")
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(IDS), reference(IDS))
        compiled = torch.compile(model, backend="eager")
        assert torch.equal(compiled(IDS), reference(IDS))
    with pytest.raises(PrepareError, match="cannot be copied or pickled"):
        pickle.dumps(model)
    end_dispatch(model)


def test_what_comes_to_the_host_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to a device may run beside the program; one to the host is waited for, or it is read too early."""
    moves: list[tuple[str, bool]] = []

    def to(self: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        moves.append((device.type, non_blocking))
        return self

    monkeypatch.setattr(Tensor, "to", to)
    move_tensors({"a": [torch.ones(1, device="meta")]}, torch.device("cpu"))
    move_tensors((torch.ones(1),), torch.device("meta"))
    assert moves == [("cpu", False), ("meta", True)]


def test_nothing_to_stream_is_an_error_that_says_what_to_do() -> None:
    with torch.device("meta"):
        model = Model()
    with pytest.raises(PrepareError, match="load_checkpoint_and_dispatch"):
        cpu_offload(model, "cpu")


def test_a_file_that_goes_away_is_an_error_and_not_a_wrong_result(
    tmp_path: Path,
) -> None:
    model = build(depth=8, width=64)
    disk_offload(model, tmp_path, "cpu")
    with torch.no_grad():
        expected = model(IDS)
        for path in tmp_path.iterdir():
            path.unlink()
        assert torch.equal(model(IDS), expected)  # mapped files stay readable
    end_dispatch(model)


def test_a_weight_shared_by_a_resident_and_a_streamed_part_stays_on_the_device(
    tmp_path: Path,
) -> None:
    reference, model = build(), build()
    dispatch_model(
        model,
        {"embed": "cpu", "start": "cpu", "blocks": "disk", "head": "disk"},
        offload_dir=tmp_path,
    )
    assert model.head.weight is model.embed.weight
    (streamer,) = streamers_of(model)
    assert all("head" not in unit.name for unit in streamer.units)
    assert model.embed.weight.data_ptr() not in {entry.resting_tensor.data_ptr() for unit in streamer.units for pack in unit.packs for entry in pack.entries}  # fmt: skip
    for _ in range(2):
        assert torch.equal(model(IDS), reference(IDS))
    end_dispatch(model)


def test_parts_on_several_devices_get_a_copy_of_a_shared_weight_each() -> None:
    model = build()
    device_map = {"embed": "cpu", "start": "cpu", "blocks": "cpu", "head": "meta"}
    dispatch_model(model, device_map, main_device="cpu")
    assert (model.embed.weight.device.type, model.head.weight.device.type) == (
        "cpu",
        "meta",
    )
    assert model.head.weight.requires_grad
    end_dispatch(model)


@pytest.mark.parametrize("offload", [on_cpu, on_disk])
def test_gradients_pass_through_a_streamed_model_that_is_not_frozen(
    offload: Callable[[Model, Path], nn.Module], tmp_path: Path
) -> None:
    """Outputs require gradients as those of the resident model; the weights' own gradients are dropped."""
    reference, model = build(), build()
    offload(model, tmp_path)
    inputs = [
        torch.randn(
            3, 4, 16, generator=torch.Generator().manual_seed(2)
        ).requires_grad_()
        for _ in range(2)
    ]
    for network, x in zip((reference, model), inputs, strict=True):
        out = network(IDS)
        assert out.requires_grad
        (network.blocks[1](x)["x"].sum() + out.square().mean()).backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]
    (streamer,) = streamers_of(model)
    packs = {id(pack): pack for unit in streamer.units for pack in unit.packs}.values()
    views = [
        view
        for pack in packs
        for unit_views in pack.views.values()
        for view in unit_views
    ]
    assert views
    assert all(view.grad is None for view in (*views, *model.parameters()))
    model.requires_grad_(False)
    assert not model(IDS).requires_grad
    end_dispatch(model)


def test_a_streamed_model_is_not_copied() -> None:
    model = cpu_offload(build(), "cpu")
    with pytest.raises(PrepareError, match="Copy it before it is dispatched"):
        copy.deepcopy(model)
    end_dispatch(model)
    copy.deepcopy(model)
