"""Arguments of the wrong kind: every method of the Accelerator refuses them by name, not with an error from somewhere inside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator, GradientAccumulationPlugin
from hasten.errors import ArgumentError, HastenError, UnknownSettingError

WRONG: Final = (3.0, -1, "a\0b", "x", b"x", object(), [1], {"a": 1}, torch.ones(2))
Call = Callable[[Accelerator, Any], object]

# What each call takes among the values above; everything else must be refused.
CALLS: Final[dict[str, tuple[Call, tuple[type, ...]]]] = {
    "backward(loss)": (lambda a, v: a.backward(v), (torch.Tensor,)),
    "prepare(objects)": (lambda a, v: a.prepare(v), ()),
    "prepare_data_loader(data_loader)": (lambda a, v: a.prepare_data_loader(v), ()),
    "accumulate(models)": (lambda a, v: a.accumulate(v), ()),
    "no_sync(model)": (lambda a, v: a.no_sync(v), ()),
    "autocast(autocast_handler)": (lambda a, v: a.autocast(v), ()),
    "profile(profile_handler)": (lambda a, v: a.profile(v), ()),
    "unscale_gradients(optimizer)": (lambda a, v: a.unscale_gradients(v), ()),
    "clip_grad_norm_(parameters)": (
        lambda a, v: a.clip_grad_norm_(v, 1.0),
        (torch.Tensor,),
    ),
    "clip_grad_norm_(max_norm)": (
        lambda a, v: a.clip_grad_norm_([torch.ones(1)], v),
        (float, int),
    ),
    "clip_grad_value_(parameters)": (
        lambda a, v: a.clip_grad_value_(v, 1.0),
        (torch.Tensor,),
    ),
    "clip_grad_value_(clip_value)": (
        lambda a, v: a.clip_grad_value_([torch.ones(1)], v),
        (float, int),
    ),
    "join_uneven_inputs(joinables)": (
        lambda a, v: a.join_uneven_inputs(v),
        (str, bytes, list, dict, torch.Tensor),
    ),
    "register_save_state_pre_hook(hook)": (
        lambda a, v: a.register_save_state_pre_hook(v),
        (),
    ),
    "register_load_state_pre_hook(hook)": (
        lambda a, v: a.register_load_state_pre_hook(v),
        (),
    ),
    "register_for_checkpointing(objects)": (
        lambda a, v: a.register_for_checkpointing(v),
        (),
    ),
    "get_state_dict(model)": (lambda a, v: a.get_state_dict(v), ()),
    "save_model(model)": (lambda a, v: a.save_model(v, "out"), ()),
    "save_model(max_shard_size)": (
        lambda a, v: a.save_model(nn.Linear(1, 1), "out", max_shard_size=v),
        (int, float),
    ),
    "reduce(reduction)": (lambda a, v: a.reduce(torch.ones(1), v), ()),
    "get_tracker(name)": (lambda a, v: a.get_tracker(v), ()),
}
PATHS: Final[dict[str, Call]] = {
    "save_state": lambda a, v: a.save_state(v),
    "load_state": lambda a, v: a.load_state(v),
    "save_model": lambda a, v: a.save_model(nn.Linear(1, 1), v),
    "load_model": lambda a, v: a.load_model(nn.Linear(1, 1), v),
    "save": lambda a, v: a.save({"a": 1}, v),
}


@pytest.fixture(name="accelerator")
def made_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    """An Accelerator that has prepared something, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(TensorDataset(torch.ones(4, 1))),
    )
    return accelerator


@pytest.mark.parametrize("name", CALLS)
def test_the_wrong_kind_is_refused_by_name(accelerator: Accelerator, name: str) -> None:
    call, taken = CALLS[name]
    for value in WRONG:
        if not isinstance(value, taken):
            with pytest.raises(HastenError) as caught:
                call(accelerator, value)
            assert len(str(caught.value)) > 30, f"{name} with {value!r}: {caught.value}"


@pytest.mark.parametrize("name", PATHS)
def test_what_names_no_file_is_refused_before_anything_is_written(
    accelerator: Accelerator, name: str
) -> None:
    for value in WRONG:
        if value != "x":
            with pytest.raises(
                ArgumentError, match=r"give a path as a string|contains a NUL character"
            ):
                PATHS[name](accelerator, value)
    assert not list(Path.cwd().iterdir())


def test_a_number_is_no_loss(accelerator: Accelerator) -> None:
    with pytest.raises(
        ArgumentError,
        match=r"accelerator\.backward\(loss\) got 3\.0 of type float; .* not loss\.item\(\)",
    ):
        accelerator.backward(3.0)  # type: ignore[arg-type]  # the mistake under test


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        (
            [{"x": torch.ones(1)}],
            r"no loss, and the batch has no 'labels' \(it has x\).*Add labels",
        ),
        (
            [{"x": torch.ones(1), "labels": 1}],
            r"no loss, although the batch has labels \(x, labels\).*model\(\*\*batch\)",
        ),
        (
            [(torch.ones(1), 1)],
            r"no loss, and there is nothing to backpropagate\. Give the model its labels",
        ),
    ],
)
def test_a_model_without_a_loss_is_named_as_the_cause(
    samples: Any, reason: str
) -> None:
    accelerator = Accelerator(cpu=True)
    for _ in accelerator.prepare(DataLoader(samples)):
        with pytest.raises(ArgumentError, match=reason):
            accelerator.backward(None)  # type: ignore[arg-type]
    assert accelerator._clock.active is None
    with pytest.raises(
        ArgumentError, match="the model returned no loss, and there is nothing"
    ):
        accelerator.backward(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ({"gradient_acumulation_steps": 2}, "gradient_accumulation_steps"),
        (
            {"gradient_acumulation_plugin": GradientAccumulationPlugin(num_steps=2)},
            "gradient_accumulation_plugin",
        ),
        ({"projet_dir": "runs"}, "project_dir"),
        ({"projet_config": {"project_dir": "runs"}}, "project_config"),
        ({"dynamo_backnd": "inductor"}, "dynamo_backend"),
        ({"kwargs_handler": []}, "kwargs_handlers"),
        ({"num_proceses": 2}, "launch.num_processes"),
    ],
)
def test_the_suggested_argument_takes_the_value(
    slip: dict[str, Any], meant: str
) -> None:
    with pytest.raises(UnknownSettingError, match=f"did you mean '{meant}'"):
        Accelerator(cpu=True, **slip)
