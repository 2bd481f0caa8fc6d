"""Behaviours of loaders, tensor operations, probes and test helpers that were seen in the original by running it, and hold here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accelerate import Accelerator
from accelerate.data_loader import (
    DataLoaderDispatcher,
    DataLoaderShard,
    prepare_data_loader,
)
from accelerate.state import PartialState
from accelerate.test_utils import testing
from accelerate.test_utils.testing import execute_subprocess_async
from accelerate.utils import check_cuda_p2p_ib_support, imports, tqdm
from accelerate.utils.operations import concatenate, slice_tensors
from accelerate.utils.versions import compare_versions

pytestmark = pytest.mark.usefixtures("fresh_states")
# Any in this file: batches, and attributes of loaders.


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
def test_a_device_may_be_a_word(kind: Any) -> None:
    PartialState(cpu=True)
    loader = kind(range(4), batch_size=2)
    loader.device = "meta"
    assert [batch.device.type for batch in loader] == ["meta", "meta"]


def test_a_dispatcher_shows_how_it_slices() -> None:
    PartialState(cpu=True)
    loader: Any = DataLoaderDispatcher(range(4), batch_size=2)
    assert loader.slice_fn is slice_tensors
    assert loader.torch_device_mesh is None


@pytest.mark.parametrize(
    "drawn", [SubsetRandomSampler(range(8)), WeightedRandomSampler([1.0] * 8, 8)]
)
def test_samplers_that_draw_share_a_generator(drawn: Any) -> None:
    PartialState(cpu=True)
    plain: Any = DataLoader(range(8), sampler=drawn, batch_size=2)  # type: ignore[arg-type]
    loader = prepare_data_loader(
        plain, num_processes=2, process_index=0, rng_types=["generator"]
    )
    assert (
        drawn.generator is not None and loader.synchronized_generator is drawn.generator
    )


def test_joined_tensors_are_found_by_their_keys() -> None:
    first, second = (
        {"a": torch.ones(1), "b": torch.zeros(1)},
        {"b": torch.zeros(2), "a": torch.ones(1), "c": 3},
    )
    assert {
        name: len(tensor) for name, tensor in concatenate([first, second]).items()
    } == {
        "a": 2,
        "b": 3,
    }
    with pytest.raises(KeyError, match="b"):
        concatenate([first, {"a": torch.ones(1)}])
    with pytest.raises(RuntimeError, match="zero-dimensional"):
        concatenate([torch.tensor(1), torch.tensor(2)])


@pytest.mark.parametrize(
    ("name", "enough", "unsuitable"),
    [("torchao", "0.6.1", "0.6.0"), ("aim", "3.29", "4.0.0")],
)
def test_some_packages_count_in_some_versions_only(
    name: str, enough: str, unsuitable: str
) -> None:
    probe = getattr(imports, f"is_{name}_available")
    with (
        patch("importlib.util.find_spec", return_value=Mock()),
        patch("importlib.metadata.metadata"),
    ):
        for version, is_available in ((enough, True), (unsuitable, False)):
            with patch("importlib.metadata.version", return_value=version):
                assert probe() is is_available


@pytest.mark.parametrize(
    ("driver", "talks"), [("550.40", False), ("550.40.06", False), ("550.40.07", True)]
)
def test_a_driver_is_new_enough_to_the_last_number(driver: str, talks: bool) -> None:
    home = "accelerate.utils.environment"
    cards = patch(
        f"{home}.get_gpu_info", return_value=(["NVIDIA GeForce RTX 4090"] * 2, 2)
    )
    with cards, patch(f"{home}.get_driver_version", return_value=driver):
        assert check_cuda_p2p_ib_support() is talks


@pytest.mark.parametrize(
    ("quiet", "echo"), [(False, True), (True, True), (False, False), (True, False)]
)
def test_a_command_is_named_unless_not_echoed_and_its_lines_are_printed_unless_quiet(
    quiet: bool, echo: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    code = r"import sys, time; print('a\rb  \n'); time.sleep(1.5); print(1); print(2, file=sys.stderr)"
    done = execute_subprocess_async(
        [sys.executable, "-c", code], timeout=1, quiet=quiet, echo=echo
    )
    assert (done.stdout, done.stderr) == (["a\rb", "", "1"], ["2"])
    printed = capsys.readouterr()
    assert printed.out.startswith("\nRunning:  ") is echo
    assert ("stdout: a" in printed.out, printed.err) == (
        (False, "") if quiet else (True, "stderr: 2\n")
    )


def test_reasons_of_tests_that_are_skipped() -> None:
    for kind, name, reason in (
        ("cuda", "cpu", "only a CPU"),
        ("xpu", "non_xpu", "a non-XPU"),
    ):
        with patch("accelerate.test_utils.testing.torch_device", kind):
            skipped = getattr(testing, f"require_{name}")(lambda: None)
        assert skipped.__unittest_skip_why__ == f"test requires {reason}"


def test_functions_name_the_module_they_have_always_been_in() -> None:
    assert (tqdm.__module__, compare_versions.__module__) == (
        "accelerate.utils.tqdm",
        "accelerate.utils.versions",
    )


def test_replaced_names_act_where_loaders_use_them() -> None:
    PartialState(cpu=True)
    plain: Any = DataLoader(range(5), batch_size=2)  # type: ignore[arg-type]
    with patch(
        "accelerate.data_loader.send_to_device",
        side_effect=lambda batch, *_, **__: batch + 5,
    ) as sent:
        for dispatch in (False, True):
            options: Any = {"dispatch_batches": dispatch, "non_blocking": True}
            loader = prepare_data_loader(
                plain, torch.device("cpu"), put_on_device=True, **options
            )
            assert [batch.tolist() for batch in loader] == [[5, 6], [7, 8], [9]]
    assert sent.call_args.args[1:] == (
        torch.device("cpu"),
    ) and sent.call_args.kwargs == {"non_blocking": True}
    with patch("accelerate.data_loader.PartialState") as state:
        state.return_value.num_processes, state.return_value.process_index = 2, 1
        assert [batch.tolist() for batch in prepare_data_loader(plain)] == [
            [2, 3],
            [1, 2],
        ]
    with patch("accelerate.data_loader.synchronize_rng_states") as together:
        drawn: Any = DataLoader(range(4), shuffle=True, generator=torch.Generator())  # type: ignore[arg-type]
        list(prepare_data_loader(drawn, rng_types=["generator"]))
    together.assert_called_once_with([], None)


def test_a_loader_tells_the_gradient_state_it_was_given() -> None:
    PartialState(cpu=True)
    loader: Any = DataLoaderShard(range(4), batch_size=2)
    loader.gradient_state = Mock()
    list(loader)
    assert [call[0] for call in loader.gradient_state.method_calls] == [
        "_add_dataloader",
        "_remove_dataloader",
    ]


@pytest.mark.parametrize(
    ("split", "kind"), [(False, "Shards"), (True, "IterableDatasetShard")]
)
def test_streams_of_datasets_give_their_shards_unless_batches_are_split(
    split: bool, kind: str
) -> None:
    class Shards(IterableDataset[int]):
        num_shards = n_shards = 2

        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

        def shard(self, num_shards: int, index: int) -> Shards:
            return self

    PartialState(cpu=True)
    plain: Any = DataLoader(Shards(), batch_size=2)
    process_options: Any = {
        "num_processes": 2,
        "process_index": 0,
        "split_batches": split,
    }
    for streams, dataset_class in ((Shards, kind), (int, "IterableDatasetShard")):
        with patch.dict(sys.modules, datasets=Mock(IterableDataset=streams)):
            with patch(
                "accelerate.data_loader.is_datasets_available", return_value=True
            ):
                assert (
                    type(prepare_data_loader(plain, **process_options).dataset).__name__
                    == dataset_class
                )
            with patch(
                "accelerate.data_loader.is_datasets_available", return_value=False
            ):
                assert (
                    type(prepare_data_loader(plain, **process_options).dataset).__name__
                    == "IterableDatasetShard"
                )


def test_a_last_batch_of_unknown_size_is_told_of_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(5), batch_sampler=[[0, 1], [2]]))  # type: ignore[arg-type]
    with caplog.at_level("INFO"):
        assert [accelerator.gather_for_metrics(batch).tolist() for batch in loader] == [
            [0, 1],
            [2],
        ]
    assert [
        record.message for record in caplog.records if "had no length" in record.message
    ] == [
        "[RANK 0] The used dataset had no length, returning gathered tensors. You should drop the remainder yourself."
    ]
