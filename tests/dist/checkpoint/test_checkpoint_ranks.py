"""Saving together: all ranks succeed or all fail, nobody hangs, and any layout loads into any other."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hasten import Accelerator
from hasten.checkpoint.base import Blob, Component, StateTree
from hasten.checkpoint.format.manifest import FileRecord, Manifest
from hasten.checkpoint.reader import open_checkpoint
from hasten.checkpoint.retention import retire_expired
from hasten.checkpoint.save import Save, save_tree
from hasten.checkpoint.store.local_store import LocalDraft, LocalStore
from hasten.comm.agreement import agreeing
from hasten.comm.local import LocalComm
from hasten.config.sections.loop import ProjectConfiguration
from hasten.config.sections.parallel import FullyShardedDataParallelPlugin
from hasten.errors import CheckpointError, HookError, MismatchError, MissingRanksError
from hasten.extensions.remote.remote_store import RemoteStore
from hasten.runtime.context import ProcessContext
from hasten.state.load_source import find_newest
from hasten.state.preemption import PREEMPTED_EXIT_CODE
from hasten.state.saving import Saving
from hasten.testing.pool import Pool, ranks


def accelerator_of(
    ctx: ProcessContext, folder: Path, sharded: bool = False, **settings: Any
) -> Accelerator:
    if sharded:
        settings |= {
            "strategy": "fsdp",
            "fsdp_plugin": FullyShardedDataParallelPlugin(),
        }
    return Accelerator(context=ctx, project_dir=str(folder), **settings)


def trained(
    accelerator: Accelerator, seed: int = 0, steps: int = 2
) -> tuple[nn.Module, Any]:
    """A prepared model and optimizer that have made some steps; uneven sizes, so that shards are uneven too."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(steps):
        accelerator.backward(model(torch.ones(2, 7)).pow(2).sum())
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole_state(
    accelerator: Accelerator, model: nn.Module, optimizer: Any
) -> list[torch.Tensor]:
    inner = accelerator.unwrap_model(model)
    tensors = list(inner.state_dict().values())
    for parameter in inner.parameters():
        values: Mapping[str, torch.Tensor] = optimizer.state[parameter]
        tensors += [values[key] for key in sorted(values)]
    return [
        t.full_tensor() if hasattr(t, "full_tensor") else t.detach().clone()
        for t in tensors
    ]


def save_from(ctx: ProcessContext, folder: Path, sharded: bool) -> list[torch.Tensor]:
    accelerator = accelerator_of(ctx, folder, sharded)
    model, optimizer = trained(accelerator)
    accelerator.save_state()
    state = whole_state(accelerator, model, optimizer)
    accelerator.end_training()
    return state


def load_into(ctx: ProcessContext, folder: Path, sharded: bool) -> list[torch.Tensor]:
    accelerator = accelerator_of(ctx, folder, sharded)
    model, optimizer = trained(accelerator, seed=5, steps=0)
    accelerator.load_state()
    state = whole_state(accelerator, model, optimizer)
    accelerator.end_training()
    return state


@pytest.mark.parametrize(("old", "new"), [(4, 2), (4, 1), (2, 4), (1, 2)])
def test_shards_load_on_another_number_of_processes(
    rank_pool: Pool, tmp_path: Path, old: int, new: int
) -> None:
    def mesh(size: int) -> dict[str, int]:
        return {"dp_shard": -1} if size > 1 else {}

    saved = rank_pool.run(save_from, old, tmp_path, old > 1, mesh=mesh(old))[0]
    for state in rank_pool.run(load_into, new, tmp_path, new > 1, mesh=mesh(new)):
        assert len(state) == len(saved)
        for a, b in zip(state, saved, strict=True):
            assert torch.equal(a, b)
    if old > 1:
        names = {
            path.name for path in (tmp_path / "checkpoints" / "checkpoint_0").iterdir()
        }
        # the last may hold nothing
        assert {
            f"model_shard_{rank:05d}.safetensors" for rank in range(old - 1)
        } <= names


@ranks(2, exhaustive=(4,))
def test_a_subset_of_ranks_gets_an_error_that_names_the_missing(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    accelerator = accelerator_of(ctx, tmp_path)
    trained(accelerator)
    project = ProjectConfiguration(project_dir=str(tmp_path), checkpoint_arrival_s=0.5)
    saving = Saving(ctx, project, accelerator._saving._run_objects)
    if ctx.rank != 1:
        started = time.monotonic()
        with pytest.raises(
            MissingRanksError,
            match=r"waited 0\.5 s .*rank 1 has not arrived.*raise checkpoint_arrival_s",
        ) as caught:
            saving.save_state()
        assert caught.value.missing == (1,)
        assert time.monotonic() - started < 5
        assert not (tmp_path / "checkpoints").exists()
    else:
        time.sleep(1.5)


class Failing:
    """State that cannot be had on one rank."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def state_dict(self) -> dict[str, Any]:
        if self._fails:
            raise ValueError("this state is broken")
        return {}

    def load_state_dict(self, state: Any) -> None:
        if self._fails:
            raise ValueError("cannot load this")


@ranks(2, 3)
def test_failure_of_one_rank_is_raised_on_all_and_changes_nothing(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    accelerator = accelerator_of(ctx, tmp_path)
    trained(accelerator)
    accelerator.save_state()
    broken = Failing(ctx.rank == 1)
    accelerator.register_for_checkpointing(broken)
    for blocking in (True, False):
        with pytest.raises(CheckpointError, match="this state is broken"):
            accelerator.save_state(blocking=blocking)
    ctx.world.barrier("look")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "checkpoint_0"
    ]


@ranks(2)
def test_a_disk_that_fails_on_one_rank_fails_all_also_in_the_background(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    class Broken(LocalDraft):
        def put(self, files: Mapping[str, Blob]) -> dict[str, FileRecord]:
            raise OSError(28, "No space left on device")

    class Store(LocalStore):
        def join(self, name: str, token: str) -> LocalDraft | None:
            draft = super().join(name, token)
            folder = tmp_path / token / name
            return (
                Broken(tmp_path / name, folder, None, self._disk, 1)
                if ctx.rank == 1 and draft is not None
                else draft
            )

    tree = StateTree({"x": Component({"w": torch.ones(3)}, None, per_rank=True)})
    with pytest.raises(CheckpointError, match=r"rank 1.*No space left"):
        save_tree(Store(tmp_path), "out", tree, Manifest(), ctx.world)
    ctx.world.barrier("look")
    assert list(tmp_path.iterdir()) == []


@ranks(2, exhaustive=(3,))
def test_a_save_into_a_folder_that_another_job_is_saving_to_comes_after_it(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    accelerator = accelerator_of(ctx, tmp_path)
    trained(accelerator)
    for _ in range(2):  # where there is nothing yet, and over what is there
        foreign_draft = LocalStore(tmp_path).begin("out") if ctx.is_main else None
        ctx.world.barrier("begun")
        for blocking in (True, False):
            accelerator.save_state(tmp_path / "out", blocking=blocking)
        accelerator.wait_for_saves()
        accelerator.load_state(tmp_path / "out")
        if foreign_draft is not None:
            assert foreign_draft.folder.is_dir(), "a draft in use stays"
            foreign_draft.abort()
        ctx.world.barrier("ended")
    ctx.world.barrier("look")
    assert not list(tmp_path.rglob(".hasten*"))


@ranks(2, 3)
def test_files_of_every_ranks_hooks_are_saved(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    for checkpoint_path in (
        str(tmp_path / "out" / "checkpoint-10"),
        f"local://{tmp_path}/url/checkpoint-10",
    ):
        accelerator = accelerator_of(ctx, tmp_path)
        trained(accelerator)

        def on_save(
            models: list[nn.Module], weights: list[dict[str, Any]], folder: str
        ) -> None:
            assert Path(folder).name == "checkpoint-10"
            (Path(folder) / f"mine_{ctx.rank}.txt").write_text(str(ctx.rank))
            # at a URL every rank has a folder of its own
            if ctx.is_main or "hasten-hooks" in folder:
                (Path(folder) / "same.txt").write_text("same")

        def on_load(models: list[nn.Module], folder: str) -> None:
            assert (Path(folder) / "same.txt").read_text() == "same"
            for rank in range(ctx.world.size):
                assert (Path(folder) / f"mine_{rank}.txt").read_text() == str(rank)

        accelerator.register_save_state_pre_hook(on_save)
        accelerator.register_load_state_pre_hook(on_load)
        accelerator.save_state(checkpoint_path)
        accelerator.load_state(checkpoint_path)


@ranks(2)
def test_weights_that_a_hook_takes_out_on_the_main_process_alone_are_taken_out_for_all(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    for taker, has_model in ((0, False), (1, True)):
        accelerator = accelerator_of(ctx, tmp_path)
        model, _ = trained(accelerator)

        def on_save(
            models: list[nn.Module],
            weights: list[dict[str, Any]],
            folder: str,
            taker: int = taker,
        ) -> None:
            if ctx.rank == taker:
                weights.pop()

        def on_load(
            models: list[nn.Module], folder: str, model: nn.Module = model
        ) -> None:
            assert models == [accelerator.unwrap_model(model)], (  # noqa: B023
                "the user's own, not what wraps it"
            )

        accelerator.register_save_state_pre_hook(on_save)
        checkpoint_path = Path(accelerator.save_state(tmp_path / f"out_{taker}"))
        assert (checkpoint_path / "model.safetensors").exists() == has_model
        if has_model:
            accelerator.register_load_state_pre_hook(on_load)
            accelerator.load_state(checkpoint_path)


@ranks(2)
def test_ranks_that_save_different_things_are_told(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    accelerator = accelerator_of(ctx, tmp_path)
    trained(accelerator)
    if ctx.rank == 0:
        accelerator.register_for_checkpointing(Failing(False))
    with pytest.raises(MismatchError, match="ranks do not save the same state"):
        accelerator.save_state()
    ctx.world.barrier("look")
    assert list((tmp_path / "checkpoints").iterdir()) == []
    second_accelerator = accelerator_of(ctx, tmp_path)
    for _ in range(1 + ctx.rank):
        second_accelerator.prepare_model(nn.Linear(2, 2), evaluation_mode=True)
    with pytest.raises(MismatchError, match="ranks do not save the same state"):
        second_accelerator.save_state()


@ranks(4)
def test_machines_without_a_shared_disk_are_detected(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    node = ctx.rank // 2
    store = LocalStore(tmp_path / f"disk{node}")
    tensors = {"w": torch.arange(5.0)}
    tree = StateTree(
        {
            "model": Component(tensors, None, "model"),
            "mine": Component({}, {"rank": ctx.rank}, per_rank=True),
        }
    )
    with pytest.raises(
        CheckpointError, match=r"ranks \[2, 3\] do not see .*save_on_each_node=True"
    ):
        save_tree(store, "out", tree, Manifest(), ctx.world, node=node)
    with agreeing(ctx.world, "saving") as together, Save(store, ctx.world) as save:
        save.start(together, "out", node=node, each_node=True)
        assert save.ranks == ((0, 1), (2, 3))[node]
        save.plan(tree, together)
        save.write(Manifest(), together)
    with open_checkpoint(store, "out", ctx.world) as checkpoint:
        assert checkpoint.manifest.ranks == save.ranks
        assert checkpoint.component("mine", ctx.rank).data == {"rank": ctx.rank}
        assert torch.equal(
            checkpoint.component("model").pieces["w"][0].data, tensors["w"]
        )


@ranks(2, 3)
def test_a_url_is_downloaded_once_per_machine(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    accelerator = Accelerator(context=ctx, project_dir=f"local://{tmp_path}/run")
    model, optimizer = trained(accelerator)
    initial_state = whole_state(accelerator, model, optimizer)
    for blocking in (True, False):
        accelerator.save_state(blocking=blocking)
    accelerator.wait_for_saves()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fetched: list[str] = []
    original = RemoteStore.fetch

    def counting(self: RemoteStore, name: str, files: Any) -> Any:
        fetched.append(name)
        return original(self, name, files)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteStore, "fetch", counting)
        accelerator.load_state()
    assert ctx.world.all_gather_object(fetched) == [
        ["checkpoint_1"],
        *([[]] * (ctx.world.size - 1)),
    ]
    for a, b in zip(
        whole_state(accelerator, model, optimizer), initial_state, strict=True
    ):
        assert torch.equal(a, b)
    accelerator.end_training()


@ranks(1, 2)
def test_background_saves_hold_one_at_a_time_and_keep_the_moment(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    accelerator = accelerator_of(ctx, tmp_path)
    model, optimizer = trained(accelerator)
    initial_state = whole_state(accelerator, model, optimizer)
    accelerator.save_state(blocking=False)
    with torch.no_grad():  # training goes on at once; the checkpoint must not see it
        for parameter in model.parameters():
            parameter.add_(1000.0)
    accelerator.save_state(blocking=False)  # waits for the first
    accelerator.wait_for_saves()
    assert str(accelerator._saving.newest()).endswith("checkpoint_1")
    accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_0")
    for a, b in zip(
        whole_state(accelerator, model, optimizer), initial_state, strict=True
    ):
        assert torch.equal(a, b)
    accelerator.end_training()


@ranks(2)
def test_retention_and_numbers_after_a_resume(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    project = ProjectConfiguration(
        project_dir=str(tmp_path), total_limit=2, keep_best=1, best_metric="loss"
    )
    first = Accelerator(context=ctx, project_config=project)
    trained(first)
    for loss in (3.0, 1.0, 2.0, 4.0):
        first.save_state(metrics={"loss": loss})
    second = Accelerator(context=ctx, project_config=project)
    trained(second, steps=0)
    second.load_state()
    second.save_state(metrics={"loss": 5.0})
    ctx.world.barrier("look")
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        f"checkpoint_{i}" for i in (1, 3, 4)
    ]


@ranks(1, 2)
@pytest.mark.parametrize("saving", [True, False])
def test_what_a_hook_raises_on_one_rank_is_named_on_all(
    ctx: ProcessContext, tmp_path: Path, saving: bool
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.save_state(tmp_path / "state")

    def refusing(*arguments: object) -> None:
        if ctx.is_main:
            raise KeyError("mine")

    if saving:
        accelerator.register_save_state_pre_hook(refusing)
    else:
        accelerator.register_load_state_pre_hook(refusing)
    with pytest.raises(HookError, match=r"refusing raised KeyError: 'mine'") as caught:
        accelerator.save_state(
            tmp_path / "other"
        ) if saving else accelerator.load_state(tmp_path / "state")
    cause: BaseException | None = caught.value
    while isinstance(cause, HookError):
        cause = cause.__cause__
    assert isinstance(cause, KeyError) == ctx.is_main
    assert not (tmp_path / "other").exists()


@ranks(2)
def test_hooks_edit_what_is_saved_and_loaded(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    accelerator = accelerator_of(ctx, tmp_path)
    model, _ = trained(accelerator)

    def on_save(
        models: list[nn.Module], weights: list[dict[str, Any]], folder: str
    ) -> None:
        if accelerator.is_main_process:
            (Path(folder) / "mine").mkdir()
            (Path(folder) / "mine" / "a file.txt").write_text("kept")
        weights.pop()

    def on_load(models: list[nn.Module], folder: str) -> None:
        assert (Path(folder) / "mine" / "a file.txt").read_text() == "kept"
        models.pop()

    saving, loading = (
        accelerator.register_save_state_pre_hook(on_save),
        accelerator.register_load_state_pre_hook(on_load),
    )
    checkpoint_path = Path(accelerator.save_state(tmp_path / "out"))
    assert "model.safetensors" not in {path.name for path in checkpoint_path.iterdir()}
    saved_parameters = [p.detach().clone() for p in model.parameters()]
    accelerator.load_state(checkpoint_path)
    assert all(
        torch.equal(a, b)
        for a, b in zip(saved_parameters, model.parameters(), strict=True)
    )
    saving.remove()
    loading.remove()
    accelerator.save_state(tmp_path / "out")
    ctx.world.barrier("look")
    assert (checkpoint_path / "model.safetensors").exists()


@ranks(2)
def test_a_signal_on_one_rank_stops_all_at_the_same_step(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    accelerator = accelerator_of(ctx, tmp_path)
    model, optimizer = trained(accelerator)
    stopped = None
    for step in range(20):
        accelerator.backward(model(torch.ones(2, 7)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if step == 3 and ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        if accelerator.preempted:
            accelerator.save_state()
            stopped = step
            break
    assert ctx.world.all_gather_object(stopped) == [stopped] * ctx.world.size
    assert stopped in (3, 4)
    assert accelerator.preempted, "it stays true"
    assert PREEMPTED_EXIT_CODE not in range(3)
    accelerator.end_training()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def save_until_killed(
    ctx: ProcessContext, folder: Path, delay_s: float, victims: tuple[int, ...]
) -> None:
    """Save again and again; some ranks die by SIGKILL at a moment of nobody's choosing."""
    if ctx.rank in victims:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    store = LocalStore(folder, threads=2)
    policy = ProjectConfiguration(total_limit=2)
    for _ in range(10_000):
        with agreeing(ctx.world, "saving") as together, Save(store, ctx.world) as save:
            save.start(together, None)
            number = int(save.draft.name.removeprefix("checkpoint_"))
            save.plan(numbered_tree(number), together)
            save.write(Manifest(number=number), together)
        if save.is_main:
            retire_expired(store, policy, lambda manifest: True)


def numbered_tree(number: int) -> StateTree:
    """A state that says in every tensor which save it belongs to."""
    tensors = {f"w{i}": torch.full((5000,), float(number)) for i in range(3)}
    rank_component = Component(
        {"r": torch.full((100,), float(number))}, None, per_rank=True
    )
    return StateTree(
        {"model": Component(tensors, None, "model"), "mine": rank_component}
    )


@pytest.mark.slow
def test_a_job_killed_at_random_instants_always_leaves_a_whole_newest(
    rank_pool: Pool, tmp_path: Path
) -> None:
    rng = random.Random(0)
    last = -1
    for _ in range(12):
        victims = rng.choice(((0,), (1,), (0, 1)))
        rank_pool.outcomes(
            save_until_killed,
            2,
            tmp_path,
            rng.uniform(0.02, 0.4),
            victims,
            timeout_s=20,
        )
        store = LocalStore(tmp_path)
        if not store.names():
            continue
        with open_checkpoint(
            store, find_newest(store) or "", LocalComm()
        ) as checkpoint:
            number = checkpoint.manifest.number
            values = {
                v
                for key in ("w0", "w1", "w2")
                for v in checkpoint.component("model").pieces[key][0].data.tolist()
            }
            for rank in range(2):
                values |= set(
                    checkpoint.component("mine", rank).pieces["r"][0].data.tolist()
                )
            assert values == {float(number or 0)}
        assert number is not None
        assert number >= last, "a committed checkpoint was lost"
        last = number
    assert last > 0
