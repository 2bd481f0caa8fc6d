"""Values that make no sense: refused by name with a typed error where the plain call would fail inside, or go on and be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator, AutocastKwargs, GradientAccumulationPlugin, set_seed
from hasten.errors import HastenError

NAN: Final = float("nan")
UNIT_TENSOR: Final = torch.ones(1)
# Any: a Prepared, whose methods are called with values of the wrong type
Call = Callable[[Any], object]


class Prepared:
    """An Accelerator with what it prepared, and a tracker that runs."""

    def __init__(self) -> None:
        self.a = Accelerator(cpu=True, log_with="jsonl")
        net = nn.Linear(1, 1)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        self.model, _, self.loader = self.a.prepare(
            net, sgd, DataLoader(TensorDataset(torch.ones(4, 1)))
        )
        self.a.init_trackers("hostile")
        self.parameters = list(self.model.parameters())


SEED: Final[Any] = set_seed


def call_method(name: str, *args: Any, **kwargs: Any) -> Call:
    """A call of the Accelerator's method."""
    return lambda prepared: getattr(prepared.a, name)(*args, **kwargs)


def make_accelerator(**settings: Any) -> Call:
    """An Accelerator made with these settings."""
    return lambda _: Accelerator(**{"cpu": True, **settings})


CALLS: Final[dict[str, tuple[Call, str]]] = {
    "nothing to prepare": (call_method("prepare", None), "nothing but None"),
    "negative epoch": (lambda g: g.loader.set_epoch(-1), "whole number from 0"),
    "text epoch": (lambda g: g.loader.set_epoch("2"), "whole number from 0"),
    "missing dimension": (
        call_method("pad_across_processes", torch.ones(2, 3), dim=5),
        "have 2 dimensions",
    ),
    "missing dimension from the end": (
        call_method("pad_across_processes", [torch.ones(2, 3)], dim=-3),
        "have 2 dimensions",
    ),
    "shards of one reader": (
        make_accelerator(
            dataloader_config={"already_sharded": True, "dispatch_batches": True}
        ),
        r"already_sharded.*contradicts.*dispatch_batches",
    ),
    "replicas without their launcher": (
        make_accelerator(survive={"replicas": 2}),
        "hasten launch --replicas 2",
    ),
    "negative max_norm": (
        lambda g: g.a.clip_grad_norm_(g.parameters, -1.0),
        "at least 0",
    ),
    "nan max_norm": (lambda g: g.a.clip_grad_norm_(g.parameters, NAN), "at least 0"),
    "nan tensor max_norm": (
        lambda g: g.a.clip_grad_norm_(g.parameters, torch.tensor(NAN)),
        "at least 0",
    ),
    "boolean max_norm": (
        lambda g: g.a.clip_grad_norm_(g.parameters, True),
        "at least 0",
    ),
    "nan norm_type": (
        lambda g: g.a.clip_grad_norm_(g.parameters, 1.0, NAN),
        "order of a norm",
    ),
    "negative norm_type": (
        lambda g: g.a.clip_grad_norm_(g.parameters, 1.0, -2),
        "order of a norm",
    ),
    "text norm_type": (
        lambda g: g.a.clip_grad_norm_(g.parameters, 1.0, "x"),
        "order of a norm",
    ),
    "negative clip_value": (
        lambda g: g.a.clip_grad_value_(g.parameters, -1.0),
        "at least 0",
    ),
    "nan clip_value": (lambda g: g.a.clip_grad_value_(g.parameters, NAN), "at least 0"),
    "huge accumulation": (
        make_accelerator(gradient_accumulation_steps=10**30),
        r"give at most 1000000|at most 64 bits",
    ),
    "large accumulation": (
        make_accelerator(gradient_accumulation_steps=10**7),
        "give at most 1000000",
    ),
    "huge accumulation plugin": (
        lambda _: GradientAccumulationPlugin(num_steps=10**7),
        "give at most 1000000",
    ),
    "huge accumulation set": (
        lambda g: setattr(g.a, "gradient_accumulation_steps", 10**30),
        "at most 1000000",
    ),
    "boolean accumulation set": (
        lambda g: setattr(g.a, "gradient_accumulation_steps", True),
        "whole number",
    ),
    "huge prefetch": (
        make_accelerator(dataloader_config={"prefetch": 10**6}),
        r"dataloader_config\.prefetch=1000000: .* at most 1024",
    ),
    "named field of a section": (
        make_accelerator(dataloader_config={"data_seed": -1}),
        r"dataloader_config\.data_seed=-1",
    ),
    "nan setting": (
        make_accelerator(trust={"stall_after_s": NAN}),
        "got nan, expected a number",
    ),
    "number as project_dir": (
        make_accelerator(project_dir=3),
        "a whole number that is no path",
    ),
    "NUL in project_dir": (make_accelerator(project_dir="a\0b"), "NUL character"),
    "number as handlers": (
        make_accelerator(kwargs_handlers=5),
        "expected a list of settings classes",
    ),
    "one handler": (
        make_accelerator(kwargs_handlers=AutocastKwargs()),
        "expected a list of settings classes",
    ),
    "text as handlers": (
        make_accelerator(kwargs_handlers="autocast"),
        "expected a list of settings classes",
    ),
    "number as log_with": (make_accelerator(log_with=3), "unclear where to log"),
    "number as context": (make_accelerator(context=3), "Give a ProcessContext"),
    "unknown method": (
        lambda g: g.a.mark_forward_method(g.model, "nope"),
        "no method 'nope'",
    ),
    "number as method": (lambda g: g.a.mark_forward_method(g.model, 3), "no method 3"),
    "attribute as method": (
        lambda g: g.a.mark_forward_method(g.model, "weight"),
        "no method 'weight'",
    ),
    "method of no model": (
        call_method("mark_forward_method", "m", "forward"),
        "needs models",
    ),
    "method of a foreign model": (
        call_method("mark_forward_method", nn.Linear(1, 1), "forward"),
        "not prepared",
    ),
    "unknown axis": (
        call_method("gather", UNIT_TENSOR, axes=["nope"]),
        "there are pp, dp_replicate",
    ),
    "text as axes": (
        call_method("gather", UNIT_TENSOR, axes="tp"),
        "list of mesh axes",
    ),
    "axis twice": (
        call_method("reduce", UNIT_TENSOR, axes=["tp", "tp"]),
        "named twice",
    ),
    "number as axis": (call_method("gather_object", 1, axes=[1]), "list of mesh axes"),
    "gather of a number": (
        call_method("gather", 3.0),
        "wrap the number in torch.tensor",
    ),
    "reduce of text": (call_method("reduce", {"a": "x"}), "works on tensors"),
    "text scale": (call_method("reduce", UNIT_TENSOR, scale="x"), "it needs a number"),
    "text from_process": (
        call_method("broadcast", UNIT_TENSOR, from_process="x"),
        "whole number",
    ),
    "negative from_process": (
        call_method("broadcast", UNIT_TENSOR, from_process=-1),
        "at least 0",
    ),
    "number as objects": (call_method("broadcast_object_list", 3), "needs a list"),
    "tuple as objects": (call_method("broadcast_object_list", (1,)), "needs a list"),
    "text dim": (
        call_method("pad_across_processes", UNIT_TENSOR, dim="x"),
        "whole number",
    ),
    "text pad_index": (
        call_method("pad_across_processes", UNIT_TENSOR, pad_index="x"),
        "it needs a number",
    ),
    "foreign loader": (
        call_method("gather_for_metrics", UNIT_TENSOR, loader=3),
        "that prepare\\(\\) returned",
    ),
    "foreign loader to follow": (
        call_method("accumulate", loader=3),
        "that prepare\\(\\) returned",
    ),
    "text sync_gradients": (
        lambda g: setattr(g.a, "sync_gradients", "x"),
        "True or False",
    ),
    "text weight": (
        lambda g: g.a.backward(g.model(UNIT_TENSOR).sum(), weight="x"),
        "is not a count",
    ),
    "number as placement": (
        call_method("prepare", nn.Linear(1, 1), device_placement=3),
        "True or False",
    ),
    "text as placement": (
        call_method("prepare", nn.Linear(1, 1), device_placement="x"),
        "True or False",
    ),
    "text to join": (call_method("join_uneven_inputs", ["x"]), "prepared models"),
    "text even_batches": (
        call_method("join_uneven_inputs", [], even_batches="x"),
        "True or False",
    ),
    "text process": (
        lambda g: g.a.process.on_process(process_index="x")(print),
        "whole number",
    ),
    "no function": (call_method("on_main_process", 3), "needs a function"),
    "number to split": (
        lambda g: g.a.split_between_processes(3).__enter__(),
        "with a length",
    ),
    "number as values": (call_method("log", 3), "values need names"),
    "list as values": (call_method("log", [1]), "values need names"),
    "text step": (call_method("log", {"a": 1}, step="q"), "not an integer"),
    "nan step": (call_method("log", {"a": 1}, step=NAN), "not an integer"),
    "boolean step": (call_method("log", {"a": 1}, step=True), "not an integer"),
    "number as log_kwargs": (
        call_method("log", {"a": 1}, log_kwargs=3),
        "assign options to trackers",
    ),
    "number as images": (call_method("log_images", 3), "values need names"),
    "text step of images": (
        call_method("log_images", {"a": torch.ones(3, 2, 2)}, step="q"),
        "not an integer",
    ),
    "ragged table": (
        call_method("log_table", "t", columns=["a"], data=[[1, 2]]),
        "1 columns and a row of 2 cells",
    ),
    "text step of a table": (
        call_method("log_table", "t", columns=["a"], data=[[1]], step="q"),
        "not an integer",
    ),
    "number as project": (call_method("init_trackers", 3), "an invalid project name"),
    "number as init_kwargs": (
        call_method("init_trackers", "x", init_kwargs=3),
        "assign options to trackers",
    ),
    "number as iterable": (call_method("progress", 3), "loop iterates over"),
    "text total": (call_method("progress", total="x"), "whole number"),
    "number as metrics": (call_method("save_state", "out", metrics=3), "named numbers"),
    "text metric": (
        call_method("save_state", "out", metrics={"a": "x"}),
        "named numbers",
    ),
    "text seed": (lambda _: SEED("x"), "not a whole number from 0"),
    "fraction as seed": (lambda _: SEED(1.5), "not a whole number from 0"),
    "no seed": (lambda _: SEED(None), "not a whole number from 0"),
    "huge seed": (lambda _: SEED(2**70), "not a whole number from 0"),
}


@pytest.fixture(name="prepared")
def prepare_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prepared]:
    """What the calls are made on, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    prepared = Prepared()
    yield prepared
    prepared.a.end_training()


@pytest.mark.parametrize("name", CALLS)
def test_nonsense_is_refused_by_name(prepared: Prepared, name: str) -> None:
    call, match = CALLS[name]
    with pytest.raises(HastenError, match=match) as caught:
        call(prepared)
    assert len(str(caught.value)) > 40, "what happened, why it matters, what to do"


def test_what_makes_sense_is_still_taken(prepared: Prepared, tmp_path: Path) -> None:
    a = prepared.a
    a.backward(prepared.model(torch.ones(2, 1)).sum())
    assert a.clip_grad_norm_(prepared.parameters, float("inf")) is not None
    a.clip_grad_value_(prepared.parameters, 0)
    a.log({"loss": 1.0, 3: 2.0}, step=torch.tensor(7))  # type: ignore[dict-item, arg-type]
    a.log({"loss": 1.0}, step=8.0)  # type: ignore[arg-type]
    assert a.gather([]) == []
    assert torch.equal(a.gather(UNIT_TENSOR, axes=["tp"]), UNIT_TENSOR)  # type: ignore[list-item]
    assert Accelerator(
        cpu=True,
        project_dir=tmp_path,  # type: ignore[arg-type]
    ).config.project.project_dir == str(tmp_path)
