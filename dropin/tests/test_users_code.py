"""Code of the original's users: pickles, references, quantized models, loggers, trackers, help, results of evaluations."""

from __future__ import annotations

import gc
import logging
import pickle
import weakref
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.commands import launch
from accelerate.commands.config.config_args import SageMakerConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.data_loader import SkipDataLoader, skip_first_batches
from accelerate.logging import get_logger
from accelerate.tracking import GeneralTracker, register_tracker_class

pytestmark = pytest.mark.usefixtures("fresh_states")
# Any in this file: results of every kind, and attributes that libraries set on models.
NUMBERS = TensorDataset(torch.arange(11))


@pytest.mark.parametrize("dispatch", [False, True])
def test_an_unpickled_accelerator_has_its_loaders(dispatch: bool) -> None:
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch)
    )
    accelerator.prepare(DataLoader(NUMBERS, batch_size=3))
    accelerator.prepare(SkipDataLoader(NUMBERS, skip_batches=2, batch_size=2))
    accelerator.prepare(skip_first_batches(DataLoader(NUMBERS, batch_size=4), 1))
    copied = pickle.loads(pickle.dumps(accelerator))
    loaders = getattr(accelerator, "_dataloaders")  # noqa: B009  a property made from a table
    assert [type(loader) for loader in copied._dataloaders] == [
        type(loader) for loader in loaders
    ]
    assert type(loaders[0]).__name__ == (
        "DataLoaderDispatcher" if dispatch else "DataLoaderShard"
    )
    batches = [[batch.tolist() for (batch,) in loader] for loader in loaders]
    assert [
        [batch.tolist() for (batch,) in loader] for loader in copied._dataloaders
    ] == batches


class Holder:
    """An Accelerator with a loader that is being iterated."""

    def __init__(self, dispatch: bool) -> None:
        config = DataLoaderConfiguration(dispatch_batches=dispatch)
        self.accelerator = Accelerator(cpu=True, dataloader_config=config)
        self.loader = self.accelerator.prepare(DataLoader(NUMBERS, batch_size=2))
        self.batches = iter(self.loader)
        next(self.batches)


@pytest.mark.parametrize("dispatch", [False, True])
def test_reference_counts_alone_free_an_accelerator(dispatch: bool) -> None:
    holder = Holder(dispatch)
    watched = [
        weakref.ref(holder.accelerator),
        weakref.ref(holder.loader),
        weakref.ref(holder.batches),
    ]
    gc.disable()
    try:
        del holder
        assert [reference() for reference in watched] == [None, None, None]
    finally:
        gc.enable()


def quantized(device_map: dict[str, Any]) -> nn.Module:
    model = nn.Linear(1, 1)
    model.__dict__.update(is_loaded_in_8bit=True, hf_device_map=device_map)
    return model


@pytest.mark.parametrize(
    ("device_map", "backends", "words"),
    [
        ({"": "cpu"}, False, "with CPU or disk offload"),
        ({"a": 0, "b": "disk"}, True, "with CPU or disk offload"),
        ({"": 1}, False, "on a different device than the one"),
        ({"": "cpu"}, True, None),
        ({"": 0}, False, None),
    ],
)
def test_an_offloaded_quantized_model_is_refused(
    device_map: dict[str, Any], backends: bool, words: str | None
) -> None:
    accelerator = Accelerator(cpu=True)
    with (
        mock.patch(
            "accelerate.accelerator.is_bitsandbytes_multi_backend_available",
            return_value=backends,
        ),
        mock.patch("accelerate.accelerator.is_xpu_available", return_value=False),
    ):
        if words is None:
            assert isinstance(
                accelerator.prepare_model(quantized(device_map)), nn.Linear
            )
        else:
            with pytest.raises(ValueError, match=words):
                accelerator.prepare_model(quantized(device_map))


def test_help_of_a_launch_shows_each_flag_once() -> None:
    parser = launch_command_parser()
    flags = Counter(
        word for word in parser.format_help().split() if word.startswith("--")
    )
    assert "--num_processes" in flags
    assert [flag for flag in flags if "-" in flag[2:]] == []
    assert parser.parse_args(["--num-processes", "3", "train.py"]).num_processes == 3


@pytest.mark.parametrize("kind", ["NO", False])
def test_settings_of_sagemaker_may_be_of_no_kind(kind: Any) -> None:
    settings = SageMakerConfig(
        compute_environment="AMAZON_SAGEMAKER",
        distributed_type=kind,
        mixed_precision="no",
        use_cpu=False,
        debug=False,
        ec2_instance_type="ml.p3.2xlarge",
        iam_role_name="role",
    )
    assert settings.distributed_type == kind


class Deeper(logging.LoggerAdapter[Any]):
    """An adapter that names the frame of its caller."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        kwargs["stacklevel"] = 3
        self.logger.log(level, msg, *args, **kwargs)


def test_an_adapter_records_the_line_of_its_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Accelerator(cpu=True)
    with caplog.at_level("INFO"):
        Deeper(get_logger("users.code"), {}).info("said")
    record = caplog.records[-1]
    assert (record.filename, record.funcName) == (
        Path(__file__).name,
        "test_an_adapter_records_the_line_of_its_caller",
    )


class Nameless(GeneralTracker):
    """A tracker without a name."""

    requires_logging_directory = False


class Placeless(GeneralTracker):
    """A tracker that does not say whether it needs a folder."""

    name = "placeless"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int, "must be a subclass"),
        (Nameless, "non-empty `name`"),
        (Placeless, "`requires_logging_directory`"),
    ],
)
def test_an_incomplete_tracker_is_not_registered(kind: type, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        register_tracker_class(kind)


@pytest.mark.parametrize(
    "result",
    [
        torch.arange(8.0),
        np.arange(8),
        list(range(8)),
        tuple(range(8)),
        "abcdefgh",
        range(8),
        b"abcdefgh",
    ],
)
def test_results_of_the_last_batch_are_cut_to_its_samples(result: Any) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(NUMBERS, batch_size=8))
    lengths = [
        len(accelerator.gather_for_metrics(result, use_gather_object=True))
        for _ in loader
    ]
    assert lengths == [8, 3]


def test_no_processes_are_the_default_number(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "show.py"
    script.write_text("print('ran')\n")
    assert launch.run(["--num_processes", "0", "--cpu", str(script)]) == 0
    assert "ran" in capfd.readouterr().out


class FirstOfTwo(Accelerator):  # type: ignore[misc]  # loaded on first use
    num_processes = property(lambda self: 2)


@pytest.mark.parametrize("by_accumulate", [False, True])
def test_a_batch_that_the_other_process_lacks_is_an_error_in_words(
    by_accumulate: bool,
) -> None:
    accelerator = FirstOfTwo(
        cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False)
    )
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    loader = accelerator.prepare(
        DataLoader(TensorDataset(torch.ones(10, 1)), batch_size=2)
    )
    num_batches = 0
    with pytest.raises(
        RuntimeError, match=r"process 0 has one batch more .*join_uneven_inputs"
    ):
        for (batch,) in loader:
            num_batches += 1
            with accelerator.accumulate(model) if by_accumulate else nullcontext():
                accelerator.backward(model(batch).mean())
                optimizer.step()
    assert num_batches == 3
    for (batch,) in loader:  # an evaluation may end at different times
        model(batch)


def test_random_numbers_that_a_save_hook_draws_are_drawn_for_the_checkpoint_too(
    tmp_path: Path,
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: torch.rand(7)
    )
    accelerator.save_state(str(tmp_path / "state"))
    expected = torch.rand(3)
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(torch.rand(3), expected)
