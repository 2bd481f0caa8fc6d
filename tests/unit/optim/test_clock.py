"""The step clock: boundaries, the window, weights and what is left to correct."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hasten.errors import ConfigError, StepError
from hasten.optim.clock import LoaderCursor, StepClock
from hasten.optim.window import divide_loss


def weighted_loss(
    clock: StepClock, loss: Tensor, weight: float | Tensor | None = None
) -> Tensor:
    """What is backpropagated of a loss."""
    return divide_loss(*clock.weigh(loss, weight))


def active_cursor(clock: StepClock) -> LoaderCursor | None:
    return clock.active


def may_clear(clock: StepClock) -> bool:
    return clock.may_clear


def epoch_boundaries(clock: StepClock, length: int) -> list[bool]:
    """The boundaries of one epoch of `length` batches."""
    cursor = LoaderCursor()
    boundaries = []
    with clock.iterate_loader(cursor):
        for batch in range(length):
            cursor.at_end = batch == length - 1
            boundaries.append(clock.tick())
    return boundaries


@pytest.mark.parametrize("every", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("length", [1, 2, 5, 7, 12])
def test_each_epoch_ends_at_a_boundary_and_each_window_is_a_mean(
    every: int, length: int
) -> None:
    clock = StepClock(every)
    cursor = LoaderCursor()
    for _ in range(3):
        total, losses = 0.0, []
        with clock.iterate_loader(cursor):
            for batch in range(length):
                cursor.at_end = batch == length - 1
                boundary = clock.tick()
                loss = torch.tensor(float(batch + 1))
                total += weighted_loss(clock, loss).item()
                losses.append(batch + 1)
                if boundary:
                    factor = clock.correction()
                    assert (
                        clock.needs_correction
                        == (factor is not None)
                        == (len(losses) != every)
                    )
                    assert total * (
                        1 if factor is None else float(factor)
                    ) == pytest.approx(sum(losses) / len(losses))
                    clock.record_update()
                    total, losses = 0.0, []
        assert not losses, "the last window of the epoch was flushed"


def test_other_models_inside_a_window_are_refused() -> None:
    clock = StepClock(2)
    first, second = (object(),), (object(),)
    assert not clock.tick(first)
    with pytest.raises(StepError, match=r"accumulate\(first, second\)"):
        clock.tick(second)
    assert clock.tick(first)
    assert not clock.tick(second), "a new window may be of other models"


def test_without_the_loader_windows_run_over_the_end_of_an_epoch() -> None:
    clock = StepClock(4, sync_with_dataloader=False)
    assert epoch_boundaries(clock, 3) + epoch_boundaries(clock, 3) == [
        False,
        False,
        False,
        True,
        False,
        False,
    ]


def test_the_innermost_loader_is_active_and_leaves_on_errors_and_out_of_order() -> None:
    clock = StepClock()
    outer, inner = LoaderCursor(), LoaderCursor()
    first, second = clock.iterate_loader(outer), clock.iterate_loader(inner)
    first.__enter__()
    second.__enter__()
    assert active_cursor(clock) is inner
    first.__exit__(None, None, None)  # zip(outer, inner) ends the outer one first
    assert active_cursor(clock) is inner
    second.__exit__(None, None, None)
    assert active_cursor(clock) is None
    with pytest.raises(KeyError), clock.iterate_loader(outer):
        raise KeyError
    assert active_cursor(clock) is None


def test_a_break_keeps_the_open_window_and_evaluation_inside_training_does_not_flush_it() -> (
    None
):
    clock = StepClock(4)
    train, evaluation = LoaderCursor(), LoaderCursor(at_end=True)
    with clock.iterate_loader(train):
        assert not clock.tick()
        with clock.iterate_loader(evaluation):
            assert active_cursor(clock) is evaluation
        assert not clock.tick()
    with clock.iterate_loader(train):
        assert [clock.tick(), clock.tick()] == [False, True]
        assert not clock.needs_correction


def test_a_new_length_acts_from_the_next_window() -> None:
    clock = StepClock(2)
    assert not clock.tick()
    clock.every = 3
    assert [clock.tick() for _ in range(4)] == [True, False, False, True]


@pytest.mark.parametrize("every", [1, 3])
def test_weighted_losses_give_the_weighted_mean(every: int) -> None:
    clock = StepClock(every)
    for weights in ([3, 5, 7], [1000, 1, 0], [0.5, 0.25, 2.0]):
        windows = [weights] if every == 3 else [[w] for w in weights]
        for window in windows:
            total = 0.0
            for weight in window:
                clock.tick()
                total += weighted_loss(
                    clock, torch.tensor(10.0 * weight), weight
                ).item()
            assert clock.needs_correction
            factor = clock.correction()
            assert factor is not None
            expected = sum(10.0 * w * w for w in window) / (sum(window) or 1)
            assert total * float(factor) == pytest.approx(expected)
            clock.record_update()


def test_a_short_window_may_be_divided_by_the_full_length() -> None:
    """The drop-in's clock: two of four micro-steps are divided by four, and a weighted window is still a weighted mean."""
    clock, cursor = StepClock(4, full_divisor=True), LoaderCursor()
    with clock.iterate_loader(cursor):
        for cursor.at_end in (False, True):
            boundary = clock.tick()
            assert weighted_loss(clock, torch.tensor(8.0)).item() == 2.0
    assert boundary
    assert not clock.needs_correction
    assert clock.correction() is None
    clock.force_boundary(True)
    assert not clock.needs_correction
    clock.record_update()
    clock.tick()
    weighted_loss(clock, torch.tensor(1.0), 3)
    assert clock.would_need_correction()


def test_weights_may_be_tensors_and_stay_on_the_device() -> None:
    clock = StepClock(2)
    total = torch.tensor(0.0)
    for weight in (torch.tensor(3), torch.tensor([5])):
        clock.tick()
        total = total + weighted_loss(clock, torch.tensor(1.0), weight)
    factor = clock.correction()
    assert isinstance(factor, torch.Tensor)
    assert float(total * factor) == pytest.approx(1.0)


def test_a_window_that_weighs_nothing_is_left_alone() -> None:
    for zero in (0, torch.tensor(0)):
        clock = StepClock()
        clock.tick()
        assert weighted_loss(clock, torch.tensor(2.0), zero).item() == 0
        assert float(clock.correction() or 0) == 1.0


def test_mixing_weighted_and_plain_losses_is_an_error_within_a_window_only() -> None:
    clock = StepClock(2)
    clock.tick()
    weighted_loss(clock, torch.tensor(1.0), 3)
    clock.tick()
    with pytest.raises(StepError, match="with and without weight="):
        weighted_loss(clock, torch.tensor(1.0))
    clock = StepClock()  # no accumulate(): a step ends the window
    weighted_loss(clock, torch.tensor(1.0), 3)
    assert clock.needs_correction
    clock.record_update()
    assert weighted_loss(clock, torch.tensor(1.0)).item() == 1.0
    assert not clock.needs_correction


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), torch.ones(2)])
def test_a_weight_that_is_no_count_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match=r"backward\(weight="):
        weighted_loss(StepClock(), torch.tensor(1.0), weight)


@pytest.mark.parametrize("every", [0, -1, 2.5, "4"])
def test_a_length_that_never_ends_is_refused(every: int) -> None:
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        StepClock(every)


def test_without_accumulate_every_backward_is_a_boundary_and_still_divided() -> None:
    clock = StepClock(4)
    assert clock.boundary
    assert weighted_loss(clock, torch.tensor(8.0)).item() == 2.0
    assert clock.correction() is None


def test_a_forced_boundary_closes_the_window_at_its_true_length() -> None:
    clock = StepClock(4)
    clock.tick()
    weighted_loss(clock, torch.tensor(1.0))
    clock.force_boundary(True)
    assert clock.needs_correction
    assert clock.correction() == 4.0
    assert not clock.tick()
    assert clock.micro == 1


def test_a_loaded_clock_is_at_the_beginning_of_a_window() -> None:
    clock = StepClock(4)
    for _ in range(3):
        clock.tick()
    weighted_loss(clock, torch.tensor(1.0), 3)
    resumed_clock = StepClock(4)
    resumed_clock.tick()
    resumed_clock.load_state_dict(clock.state_dict())
    assert [resumed_clock.tick() for _ in range(4)] == [False, False, False, True]
    assert resumed_clock.weights.unit == clock.weights.unit


def test_a_position_is_kept_from_before_the_first_batch_of_each_window() -> None:
    """Loaders read side by side, one nested for an evaluation: the position is that before the first of the batches."""
    clock, reads = StepClock(2), itertools.count()
    clock.read_position = lambda: next(reads)
    first, second, evaluation = LoaderCursor(), LoaderCursor(), LoaderCursor()
    with clock.iterate_loader(first), clock.iterate_loader(second):
        for window in range(3):
            for _ in range(2):
                for cursor in (first, second):
                    clock.keep_position(cursor)
                    clock.loaders.record_batch(cursor)
                clock.tick()
                weighted_loss(clock, torch.tensor(1.0))
                assert clock.position == 2 * window
            clock.record_update()
            assert clock.position is None
            with clock.iterate_loader(evaluation):
                clock.keep_position(evaluation)
                clock.loaders.record_batch(evaluation)
    assert next(reads) == 6


def test_clearing_waits_while_a_window_needs_its_gradients() -> None:
    clock = StepClock(2)
    clock.tick()
    assert not may_clear(clock)
    weighted_loss(clock, torch.tensor(1.0))
    clock.tick()
    assert not may_clear(clock), "a loop that clears first must not lose micro-step one"
    weighted_loss(clock, torch.tensor(1.0))
    assert may_clear(clock)
    assert clock.in_flight == 2
    clock.record_update()
    assert may_clear(clock)
    assert clock.in_flight == 0


@pytest.mark.parametrize("weight", [None, 2])
def test_an_interrupted_micro_step_is_taken_back(weight: int | None) -> None:
    clock = StepClock(2)
    clock.tick()
    weighted_loss(clock, torch.tensor(1.0), weight)
    clock.tick()  # the last of the window, but it fails before its backward
    clock.roll_back_micro_step()
    assert may_clear(clock), "an except block may clear"
    assert clock.tick(), "and may as well go on: the next micro-step takes its place"
    weighted_loss(clock, torch.tensor(1.0), weight)
    assert clock.micro == 2
    assert clock.needs_correction == (weight is not None)
    clock.record_update()
    assert not clock.tick()


@pytest.mark.parametrize("weight", [None, 2])
def test_gradients_cleared_after_an_interruption_are_missing(
    weight: int | None,
) -> None:
    clock = StepClock(2)
    clock.tick()
    weighted_loss(clock, torch.tensor(1.0), weight)
    clock.tick()
    clock.roll_back_micro_step()
    clock.drop_accumulated()
    assert clock.tick()
    share = weighted_loss(clock, torch.tensor(1.0), weight)
    factor = clock.correction()
    assert factor is not None
    assert float(share * factor) == pytest.approx(1.0)


def test_a_window_whose_first_micro_step_was_taken_back_has_the_new_length() -> None:
    clock = StepClock(every=4)
    clock.tick()
    clock.roll_back_micro_step()
    clock.every = 2
    assert not clock.tick()
    assert clock.tick()
