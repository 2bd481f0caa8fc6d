"""Checks of a whole installation, which `accelerate test` runs: processes, random states, loaders and training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from accelerate._impl.accelerator.facade import Accelerator
from accelerate._impl.environment.packages import is_datasets_available
from accelerate._impl.loaders.samplers import BatchSamplerShard, SeedableRandomSampler
from accelerate._impl.loaders.share import prepare_data_loader
from accelerate._impl.settings.general import DataLoaderConfiguration
from accelerate._impl.tensors import gather, gather_object
from accelerate._impl.testing.cases import (
    are_the_same_tensors,
    assert_exception,
    capture_call_output,
)
from accelerate._impl.testing.training import RegressionDataset, RegressionModel
from accelerate._impl.views.random import synchronize_rng_states
from accelerate._impl.views.state import AcceleratorState, PartialState
from hasten.optional import need
from hasten.runtime.seeding import set_seed

# Any in this file: states, whose attributes live in a shared dictionary, and what `prepare` returns.
ATOL = 1e-6
RTOL = 1e-6


def generate_baseline_dataloader(
    train_set: Any,
    generator: torch.Generator,
    batch_size: int,
    use_seedable_sampler: bool = False,
) -> DataLoader[Any]:
    if use_seedable_sampler:
        sampler = SeedableRandomSampler(train_set, generator=generator, data_seed=42)
        return DataLoader(train_set, batch_size=batch_size, sampler=sampler)
    return DataLoader(
        train_set, batch_size=batch_size, shuffle=True, generator=generator
    )


def _make_print(description: str, index: str, subject: str) -> Callable[..., None]:
    def say(state: Any, process_idx: int = 0) -> None:
        print(f"Printing from {subject.format(process_idx)} {getattr(state, index)}")  # noqa: T201  captured by the check

    say.__doc__ = description
    return say


print_main = _make_print(
    "Print from the main process.", "process_index", "the main process"
)
print_local_main = _make_print(
    "Print from a machine's main process.",
    "local_process_index",
    "the local main process",
)
print_last = _make_print(
    "Print from the last process.", "process_index", "the last process"
)
print_on = _make_print(
    "Print from a process of this index.", "process_index", "process {}:"
)


def process_execution_check() -> None:
    """Check that decorated functions run on their process only, and that the first process enters a block first."""
    accelerator = Accelerator()
    process_state = accelerator.state
    last = accelerator.num_processes - 1
    cases: list[tuple[Callable[..., Any], tuple[Any, ...], bool]] = [
        (
            accelerator.on_main_process(print_main),
            (process_state,),
            accelerator.is_main_process,
        ),
        (
            accelerator.on_local_main_process(print_local_main),
            (process_state,),
            accelerator.is_local_main_process,
        ),
        (
            accelerator.on_last_process(print_last),
            (process_state,),
            accelerator.process_index == last,
        ),
    ]
    for process_index in range(accelerator.num_processes):
        cases.append(
            (
                accelerator.on_process(print_on, process_index=process_index),
                (process_state, process_index),
                accelerator.process_index == process_index,
            )
        )
    for function, args, runs_here in cases:
        printed_text = capture_call_output(function, *args).strip()
        assert bool(printed_text) == runs_here, (
            f"process {accelerator.process_index} said {printed_text!r}"
        )
        accelerator.wait_for_everyone()
    with accelerator.main_process_first():
        order = accelerator.process_index
    assert gather_object([order]) == list(range(accelerator.num_processes))


def init_state_check() -> None:
    process_state = AcceleratorState()
    process_state.print(process_state)


def rng_sync_check() -> None:
    """Check that random states are equal on every process after they were synchronised."""
    process_state = AcceleratorState()
    torch.manual_seed(process_state.process_index)
    synchronize_rng_states(["torch"])
    assert are_the_same_tensors(torch.get_rng_state()), (
        "the states of torch differ between processes"
    )
    generator = torch.Generator().manual_seed(process_state.process_index)
    synchronize_rng_states(["generator"], generator=generator)
    assert are_the_same_tensors(generator.get_state()), (
        "the states of the generator differ between processes"
    )
    process_state.print("All rng are properly synched.")


def _gather_rows(loader: Any) -> torch.Tensor:
    return torch.cat(list(map(gather, loader))).cpu()


def _loaders_checked(dispatch_batches: bool) -> None:
    process_state: Any = AcceleratorState()
    length = 32 * process_state.num_processes
    for shuffle in (False, True):
        for split_batches in (False, True):
            batch_size = 8 * (process_state.num_processes if split_batches else 1)
            plain = DataLoader(range(length), batch_size=batch_size, shuffle=shuffle)  # type: ignore[arg-type, var-annotated]
            loader_options: Any = {
                "put_on_device": True,
                "split_batches": split_batches,
                "dispatch_batches": dispatch_batches,
            }
            loaded_rows = _gather_rows(
                prepare_data_loader(
                    plain,
                    process_state.device,
                    process_state.num_processes,
                    process_state.process_index,
                    **loader_options,
                )
            )
            assert torch.equal(loaded_rows.sort().values, torch.arange(length)), (
                f"rows {loaded_rows.tolist()} of {length}"
            )
            assert shuffle or torch.equal(loaded_rows, torch.arange(length)), (
                f"rows out of order: {loaded_rows.tolist()}"
            )
            assert not shuffle or not torch.equal(loaded_rows, torch.arange(length)), (
                "rows were not shuffled"
            )
        if dispatch_batches:
            loader_name = "central dataloader"
        else:
            loader_name = "dataloader"
        process_state.print(
            f"{'Shuffled' if shuffle else 'Non-shuffled'} {loader_name} passing."
        )


def dl_preparation_check() -> None:
    """Check that the processes read every row once, in order unless shuffled."""
    _loaders_checked(False)


def central_dl_preparation_check() -> None:
    _loaders_checked(True)


def custom_sampler_check() -> None:
    process_state: Any = AcceleratorState()
    rows = list(range(16 * process_state.num_processes))
    loader: DataLoader[Any] = DataLoader(
        rows,  # type: ignore[arg-type]
        batch_sampler=BatchSampler(rows[::-1], 4, False),
    )
    prepared = prepare_data_loader(
        loader,
        process_state.device,
        process_state.num_processes,
        process_state.process_index,
        put_on_device=True,
    )
    assert _gather_rows(prepared).tolist() == rows[::-1]


def _shuffled_reader(**options: Any) -> Callable[[], list[Any]]:
    loader_config = DataLoaderConfiguration(use_seedable_sampler=True, **options)
    loader = Accelerator(dataloader_config=loader_config).prepare(
        DataLoader(range(16), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    )
    return lambda: [batch.tolist() for batch in loader]


def check_seedable_sampler() -> None:
    """Check that a seed gives the same order again, and each epoch another one."""
    set_seed(42)
    first = (read_rows := _shuffled_reader())()
    second = read_rows()
    set_seed(42)
    assert _shuffled_reader()() == first != second


def check_seedable_sampler_with_data_seed() -> None:
    set_seed(1)
    first = _shuffled_reader(data_seed=42)()
    set_seed(2)
    assert _shuffled_reader(data_seed=42)() == first != _shuffled_reader(data_seed=43)()


def check_seedable_sampler_in_batch_sampler_shard() -> None:
    loader_config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator: Any = Accelerator(dataloader_config=loader_config)
    plain: DataLoader[Any] = DataLoader(range(64), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    prepared = prepare_data_loader(
        plain, accelerator.device, 2, 0, put_on_device=True, use_seedable_sampler=True
    )
    assert isinstance(prepared.batch_sampler, BatchSamplerShard)
    assert isinstance(
        prepared.batch_sampler.batch_sampler.sampler, SeedableRandomSampler
    )
    assert isinstance(plain.sampler, RandomSampler)


def mock_training(
    length: int,
    batch_size: int,
    generator: torch.Generator,
    use_seedable_sampler: bool = False,
) -> tuple[RegressionDataset, nn.Module]:
    set_seed(42)
    generator.manual_seed(42)
    data = RegressionDataset(length=length, seed=42)
    model = RegressionModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = generate_baseline_dataloader(
        data, generator, batch_size, use_seedable_sampler
    )
    _three_epochs(model, loader, optimizer, torch.Tensor.backward)
    return data, model


def _three_epochs(
    model: Any, loader: Any, optimizer: Any, backward: Callable[[torch.Tensor], None]
) -> None:
    for batch in (batch for _ in range(3) for batch in loader):
        model.zero_grad()
        backward(nn.functional.mse_loss(model(batch["x"]).float(), batch["y"]))
        optimizer.step()


def _train_model(
    data: RegressionDataset,
    generator: torch.Generator,
    size: int,
    seedable: bool,
    **options: Any,
) -> Any:
    precision = options.pop("mixed_precision", None)
    loader_config = DataLoaderConfiguration(use_seedable_sampler=seedable, **options)
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        mixed_precision=precision, dataloader_config=loader_config
    )
    set_seed(42)
    generator.manual_seed(42)
    loader: Any = generate_baseline_dataloader(data, generator, size, seedable)
    model: Any = RegressionModel()
    loader, model, optimizer = accelerator.prepare(
        loader, model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    _three_epochs(model, loader, optimizer, accelerator.backward)
    return accelerator.unwrap_model(model).cpu()


def training_check(use_seedable_sampler: bool = False) -> None:
    """Check that training gives the weights of one process, with either way to split batches and in each precision."""
    process_state: Any = AcceleratorState()
    generator = torch.Generator()
    batch_size = 8
    n = process_state.num_processes
    data, plain = mock_training(
        batch_size * 4 * n, batch_size * n, generator, use_seedable_sampler
    )
    for split, split_text in ((False, "no batch split"), (True, "batch split")):
        trained = _train_model(
            data,
            generator,
            batch_size * n if split else batch_size,
            use_seedable_sampler,
            split_batches=split,
        )
        for plain_parameter, trained_parameter in zip(
            plain.parameters(), trained.parameters(), strict=True
        ):
            assert torch.allclose(
                plain_parameter, trained_parameter, atol=ATOL, rtol=RTOL
            ), f"{split_text}: {trained_parameter} instead of {plain_parameter}"
        process_state.print(
            f"Training yielded the same results on one CPU or distributed setup with {split_text}."
        )
    for precision in ("bf16", "fp16"):
        trained = _train_model(
            data, generator, batch_size, use_seedable_sampler, mixed_precision=precision
        )
        for plain_parameter, trained_parameter in zip(
            plain.parameters(), trained.parameters(), strict=True
        ):
            assert torch.allclose(plain_parameter, trained_parameter, atol=0.1), (
                f"{precision}: {trained_parameter}, far from {plain_parameter}"
            )
        process_state.print(f"{precision.upper()} training check.")
    AcceleratorState._reset_state()
    Accelerator()


def test_split_between_processes_list() -> None:
    process_state = AcceleratorState()
    with process_state.split_between_processes(
        list(range(2 * process_state.num_processes))
    ) as own_share:
        assert own_share == [
            2 * process_state.process_index,
            2 * process_state.process_index + 1,
        ], own_share
    if process_state.num_processes > 1:
        with process_state.split_between_processes(
            list(range(3 * process_state.num_processes - 1)), apply_padding=True
        ) as own_share:
            assert len(own_share) == 3, own_share


def test_split_between_processes_nested_dict() -> None:
    process_state = AcceleratorState()
    count = 2 * process_state.num_processes
    rank = process_state.process_index
    full_dict: dict[str, Any] = {
        "a": list(range(count)),
        "b": list(map(str, range(count))),
        "c": torch.arange(count),
    }
    with process_state.split_between_processes(full_dict) as own_share:
        assert own_share["a"] == [2 * rank, 2 * rank + 1] and own_share["b"] == [
            str(2 * rank),
            str(2 * rank + 1),
        ], own_share
        assert own_share["c"].tolist() == own_share["a"], own_share


def test_split_between_processes_tensor() -> None:
    process_state = AcceleratorState()
    rows = torch.arange(4 * process_state.num_processes).view(
        process_state.num_processes, 4
    )
    with process_state.split_between_processes(rows) as own_rows:
        assert torch.equal(
            own_rows.cpu(),
            rows[process_state.process_index : process_state.process_index + 1],
        ), own_rows


def test_split_between_processes_evenly() -> None:
    """Check that every element is given to one process, and that shares differ by one at most."""
    process_state = AcceleratorState()
    everything = list(range(17))
    with process_state.split_between_processes(everything) as own_share:
        shares_of_ranks = gather_object([list(own_share)])
    assert (
        sorted(element for each in shares_of_ranks for element in each) == everything
    ), shares_of_ranks
    assert max(map(len, shares_of_ranks)) - min(map(len, shares_of_ranks)) <= 1, (
        shares_of_ranks
    )


def test_split_between_processes_dataset(datasets_Dataset: Any) -> None:  # noqa: N803  the original's name
    process_state = AcceleratorState()
    full_dataset = datasets_Dataset.from_list(
        [{"k": number} for number in range(2 * process_state.num_processes)]
    )
    with process_state.split_between_processes(full_dataset) as own_share:
        assert own_share["k"][:] == [
            2 * process_state.process_index,
            2 * process_state.process_index + 1,
        ], own_share


def test_trigger() -> None:
    """Check that a flag set on one process is seen by all, once."""
    accelerator = Accelerator()
    assert not accelerator.check_trigger()
    if accelerator.is_main_process:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


def test_reinstantiated_state() -> None:
    """Check that an Accelerator can be made after its state was reset, and that attributes of a reset state say so."""
    AcceleratorState._reset_state()
    accelerator = Accelerator()
    assert accelerator.state.initialized
    AcceleratorState._reset_state(True)
    with assert_exception(AttributeError, "_reset_state()"):
        _ = accelerator.state.distributed_type


def main() -> None:
    process_state: Any = Accelerator().state
    process_state.print("**Initialization**")
    init_state_check()
    checks: list[Callable[..., None]] = [
        process_execution_check,
        test_split_between_processes_list,
    ]
    checks += [
        test_split_between_processes_nested_dict,
        test_split_between_processes_tensor,
    ]
    checks += [
        test_split_between_processes_evenly,
        rng_sync_check,
        dl_preparation_check,
        central_dl_preparation_check,
    ]
    checks += [
        custom_sampler_check,
        check_seedable_sampler,
        check_seedable_sampler_with_data_seed,
    ]
    checks += [check_seedable_sampler_in_batch_sampler_shard]
    for check in checks:
        process_state.print(f"\n**{check.__name__}**")
        check()
    if is_datasets_available():
        test_split_between_processes_dataset(need("datasets").Dataset)
    for seedable in (False, True):
        process_state.print(
            f"\n**Training integration test, use_seedable_sampler={seedable}**"
        )
        training_check(seedable)
    process_state = PartialState()
    process_state.print("\n**Breakpoint trigger test**")
    test_trigger()
    process_state.print("\n**Test reinstantiated state**")
    test_reinstantiated_state()
