"""Where models are cut, on one process: containers, sides, ties, and what each rank holds of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hasten.config.sections.parallel import PipelineParallelConfig
from hasten.errors import ConfigError, PrepareError
from hasten.extensions.pipeline.cut import (
    StageCut,
    decide_cut,
    find_shared_parameters,
    part_of,
)
from hasten.extensions.pipeline.stage_plan import StagePlacement
from hasten.testing.toys import TinyLM


def cut(model: nn.Module, stages: int = 2, **settings: tuple[str, ...]) -> StageCut:
    return decide_cut(model, PipelineParallelConfig(**settings), StagePlacement(stages))  # type: ignore[arg-type]  # tuples of names


def lm(depth: int = 4, tied: bool = False) -> TinyLM:
    return TinyLM(vocab=8, width=4, heads=2, depth=depth, context=4, tied=tied)


def test_the_list_of_blocks_is_found_and_the_rest_sorted_by_registration() -> None:
    stage_cut = cut(lm())
    assert (stage_cut.container, stage_cut.first, stage_cut.last) == (
        "blocks",
        ("embed", "position"),
        ("norm", "head"),
    )
    assert stage_cut.ranges == ((0, 2), (2, 4))
    assert cut(lm(), split_points=("blocks.1",)).ranges == ((0, 1), (1, 4))
    assert cut(lm(), split_points=("blocks.0", "blocks.3")).ranges == ((0, 3), (3, 4))


def test_a_sequential_is_its_own_list() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))
    assert cut(model).container == ""
    assert cut(model, 3).stage_of("3.weight") == 2


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_every_key_is_written_once_and_every_parameter_has_one_owner(
    stages: int, tied: bool
) -> None:
    model = lm(tied=tied)
    # on the way to the blocks: every rank keeps it
    model.extra = nn.Parameter(torch.zeros(3))
    stage_cut = cut(model, stages)
    stage_parts = [part_of(model, stage_cut, rank) for rank in range(stages)]
    written = [key for stage_part in stage_parts for key in stage_part.own_keys]
    assert sorted(written) == sorted(model.state_dict())
    several = find_shared_parameters(model, stage_cut)
    expected = {"extra": tuple(range(stages))} if stages > 1 else {}
    if tied and stages > 1:
        expected["embed.weight"] = (0, stages - 1)
    assert several == expected
    for name, holders in several.items():
        assert [name in stage_part.copies for stage_part in stage_parts] == [
            r in holders[1:] for r in range(stages)
        ]
    if tied and stages > 1:
        assert stage_parts[-1].whole_names == {"head.weight": "embed.weight"}


def test_models_and_names_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="is not a member of a ModuleList or Sequential"
    ):
        cut(lm(), split_points=("head",))
    with pytest.raises(ConfigError, match="Name blocks of one list"):
        cut(
            nn.ModuleDict({"a": lm(), "b": lm()}),
            split_points=("a.blocks.1", "b.blocks.1"),
        )
    with pytest.raises(
        ConfigError, match="makes 3 stages, but pp_size and the schedule need 2"
    ):
        cut(lm(), split_points=("blocks.1", "blocks.2"))
    with pytest.raises(ConfigError, match=r"these are: embed, position, norm, head\."):
        cut(lm(), first_stage=("tail",))
    with pytest.raises(ConfigError, match="Use pp_size up to 4"):
        cut(lm(), 8)
    with pytest.raises(PrepareError, match="several lists of blocks"):
        cut(nn.ModuleDict({"a": lm(), "b": lm()}))
