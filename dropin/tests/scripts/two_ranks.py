"""What only several processes can show; checks itself, and prints "fine". Started with two ranks by test_repaired.py."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    gather,
    pad_across_processes,
    set_seed,
)
from accelerate.utils.operations import DistributedOperationException


def fresh(**settings):
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    set_seed(0)
    return Accelerator(cpu=True, **settings)


def joins_uneven_loaders(even_batches):
    """Five batches for two ranks: one rank runs out first, nobody waits for it, and no row is used twice."""
    accelerator = fresh(
        dataloader_config=DataLoaderConfiguration(even_batches=even_batches is not None)
    )
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = DataLoader(TensorDataset(torch.arange(1.0, 6.0).unsqueeze(1)), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, data)
    read_rows = []
    with accelerator.join_uneven_inputs([model], even_batches=even_batches):
        for (x,) in loader:
            read_rows.append(x.item())
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert read_rows == (
        [1.0, 3.0, 5.0] if accelerator.process_index == 0 else [2.0, 4.0]
    ), read_rows
    assert sum(1 for _ in loader) == (
        3 if even_batches is False or accelerator.process_index == 0 else 2
    )
    weights = accelerator.gather(
        accelerator.unwrap_model(model).weight.detach().flatten()
    )
    assert weights.tolist() == [-7.5, -7.5], (
        weights
    )  # (1 + 2) / 2 + (3 + 4) / 2 + 5 / 2: torch's Join divides by all ranks


def clips_where_a_window_ends():
    """Inside a window the call tells the norm and changes nothing; at its end it clips the mean over all ranks."""
    accelerator = fresh(gradient_accumulation_steps=2)
    x = torch.randn(8, 4)
    model = nn.Linear(4, 1)
    reference = nn.Linear(4, 1)
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(x), batch_size=2)
    )
    for step, (rows,) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).pow(2).mean())
            raw_gradients = [p.grad.clone() for p in model.parameters()]
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.01)
            clipped_gradients = [p.grad for p in model.parameters()]
            assert torch.allclose(
                norm,
                torch.linalg.vector_norm(
                    torch.cat([g.flatten() for g in raw_gradients])
                ),
            )
            if step == 0:
                assert not accelerator.sync_gradients
                assert all(
                    torch.equal(a, b)
                    for a, b in zip(raw_gradients, clipped_gradients, strict=True)
                )
            else:
                assert accelerator.sync_gradients
                reference(x).pow(2).mean().backward()
                assert torch.allclose(
                    norm,
                    nn.utils.clip_grad_norm_(reference.parameters(), 0.01),
                    atol=1e-6,
                )
                for clipped, reference_parameter in zip(
                    clipped_gradients, reference.parameters(), strict=True
                ):
                    assert torch.allclose(clipped, reference_parameter.grad, atol=1e-7)
            optimizer.step()
            optimizer.zero_grad()


def deals_out_what_a_weighted_sampler_draws(seedable):
    """Ranks whose torch generators differ draw one order together, of which each takes its batches."""
    accelerator = fresh(
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable)
    )
    torch.manual_seed(accelerator.process_index)
    drawn = WeightedRandomSampler([1.0] * 16, 16, replacement=False)
    loader = accelerator.prepare(
        DataLoader(torch.arange(16), sampler=drawn, batch_size=4)
    )
    for _ in range(2):
        assert sorted(accelerator.gather(torch.cat(list(loader))).tolist()) == list(
            range(16)
        )


def names_shapes_that_differ_when_the_state_asks_for_it():
    """`PartialState().debug` is read at each call, and the error is the original's."""
    rank = fresh().process_index
    PartialState().debug = True
    for operation, rows in (
        (gather, 1 + rank),
        (pad_across_processes, (1,) * (1 + rank)),
    ):
        error_message = ""
        try:
            operation(torch.ones(rows))
        except DistributedOperationException as error:
            error_message = str(error)
        assert f"accelerate.utils.operations.{operation.__name__}" in error_message, (
            error_message
        )
    PartialState().debug = False


if __name__ == "__main__":
    torch.set_num_threads(1)
    joins_uneven_loaders(even_batches=None)
    joins_uneven_loaders(even_batches=False)
    clips_where_a_window_ends()
    deals_out_what_a_weighted_sampler_draws(seedable=False)
    deals_out_what_a_weighted_sampler_draws(seedable=True)
    names_shapes_that_differ_when_the_state_asks_for_it()
    Accelerator().print("fine")
