"""Partition of a model into pipeline stages: its list of blocks, the modules before and after them, and their ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from hasten.config.sections.parallel import PipelineParallelConfig
from hasten.errors import ConfigError, PrepareError
from hasten.extensions.pipeline.stage_plan import Range, StagePlacement, balanced
from hasten.modules.names import StagePart
from hasten.strategies.blocks import repeated_blocks

_LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True, slots=True)
class StageCut:
    """Partition of one model, decided before the model is changed."""

    container: str
    """Name of the list of blocks."""
    blocks: tuple[str, ...]
    """Names of the blocks in that list."""
    ranges: tuple[Range, ...]
    """Blocks of each stage."""
    first: tuple[str, ...]
    """Modules with state that run before the blocks."""
    last: tuple[str, ...]
    """Modules with state that run after the blocks."""
    place: StagePlacement

    def stage_of(self, name: str) -> int | None:
        """Return the stage of a parameter, buffer or module; None for one that every stage has."""
        inner_name = name.removeprefix(f"{self.container}.") if self.container else name
        if not self.container or inner_name != name:
            index = self.blocks.index(inner_name.partition(".")[0])
            return next(
                stage
                for stage, (start, stop) in enumerate(self.ranges)
                if start <= index < stop
            )
        if any(_is_inside(name, unit) for unit in self.first):
            return 0
        return (
            len(self.ranges) - 1
            if any(_is_inside(name, unit) for unit in self.last)
            else None
        )

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Return the positions along the pipeline of the ranks that hold a name."""
        stage = self.stage_of(name)
        return (
            tuple(range(self.place.ranks))
            if stage is None
            else (self.place.rank_of(stage),)
        )


def decide(
    model: nn.Module, config: PipelineParallelConfig, place: StagePlacement
) -> StageCut:
    """Return the partition of the model. Raises: ConfigError or PrepareError, with advice, if it cannot be partitioned."""
    container = _container(model, config, place.stages)
    blocks = dict(model.get_submodule(container).named_children())
    _check_length(container, len(blocks), place)
    first_units, last_units = _outside(model, container, config)
    ranges = _ranges_of_points(
        config.split_points, list(blocks), place.stages
    ) or _balanced_ranges(model, list(blocks.values()), first_units, last_units, place)
    return StageCut(container, tuple(blocks), ranges, first_units, last_units, place)


def _container(model: nn.Module, config: PipelineParallelConfig, stages: int) -> str:
    model_name = type(model).__name__
    if config.split_points:
        parents = {point.rpartition(".")[0] for point in config.split_points}
        for point in config.split_points:
            parent = dict(model.named_modules()).get(point.rpartition(".")[0])
            if not isinstance(parent, _LISTS) or point.rpartition(".")[2] not in dict(
                parent.named_children()
            ):
                raise ConfigError(
                    f"pp_handler.split_points names {point!r}, which is not a member of a ModuleList or Sequential of "
                    f"{model_name}; a stage must start with a block of such a list. Its lists are: {_list_some(list(_lists(model)))}."
                )
        if len(parents) > 1:
            raise ConfigError(
                f"pp_handler.split_points names blocks of {len(parents)} lists ({', '.join(sorted(parents))}), but stages exchange the "
                "output of blocks of one list. Name blocks of one list."
            )
        return parents.pop()
    block_lists = dict.fromkeys(
        list_path.rpartition(".")[0] for list_path, _ in repeated_blocks(model)
    )
    outermost_lists = [
        list_path
        for list_path in block_lists
        if not any(
            list_path != other_path and _is_inside(list_path, other_path)
            for other_path in block_lists
        )
    ]
    if isinstance(model, nn.Sequential) and (
        not outermost_lists or len(model) >= stages
    ):
        return ""
    if len(outermost_lists) == 1:
        return outermost_lists[0]
    reason = (
        "no list of repeated blocks"
        if not outermost_lists
        else f"several lists of blocks ({', '.join(outermost_lists)})"
    )
    raise PrepareError(
        f"{model_name} has {reason}, so it is unclear how to split it into {stages} stages. A pipeline needs one ModuleList or Sequential whose "
        "blocks pass on one tensor; name the first blocks of the stages in pp_handler.split_points, or "
        "use tp_size or dp_shard_size for this model."
    )


def _check_length(container: str, number: int, place: StagePlacement) -> None:
    if number < place.stages:
        raise ConfigError(
            f"{container or 'the model'!r} has {number} blocks, fewer than the {place.stages} stages that pp_size="
            f"{place.ranks} with {place.per_rank} on each rank requires; a stage needs at least one block. Use pp_size up to "
            f"{number // place.per_rank}."
        )


def _outside(
    model: nn.Module, container: str, config: PipelineParallelConfig
) -> tuple[tuple[str, ...], ...]:
    """Return the modules with state outside the blocks: those before the blocks, and those after them."""
    first: list[str] = []
    last: list[str] = []
    for unit, runs_before in _units_outside(model, container):
        if unit in config.first_stage:
            runs_before = True
        elif unit in config.last_stage:
            runs_before = False
        (first if runs_before else last).append(unit)
    for setting, names in (
        ("first_stage", config.first_stage),
        ("last_stage", config.last_stage),
    ):
        if unknown_names := sorted(set(names) - {*first, *last}):
            raise ConfigError(
                f"pp_handler.{setting} names {unknown_names[0]!r}, which is not a module with weights outside the blocks of "
                f"{type(model).__name__}; these are: {_list_some([*first, *last])}."
            )
    return tuple(first), tuple(last)


def _units_outside(model: nn.Module, container: str) -> Iterator[tuple[str, bool]]:
    """Yield the outermost modules with state outside the container, and whether they are registered before it."""
    path_parts = container.split(".") if container else []
    module = model
    for depth, child_name in enumerate(path_parts):
        prefix = ".".join(path_parts[:depth])
        is_before = True
        for name, child in module.named_children():
            if name == child_name:
                is_before = False
            elif child.state_dict():
                yield (f"{prefix}.{name}" if prefix else name), is_before
        module = module.get_submodule(child_name)


def _ranges_of_points(
    split_points: Sequence[str] | None, blocks: Sequence[str], stages: int
) -> tuple[Range, ...]:
    if not split_points:
        return ()
    starts = sorted(
        {0, *(blocks.index(point.rpartition(".")[2]) for point in split_points)}
    )
    if len(starts) != stages:
        raise ConfigError(
            f"pp_handler.split_points makes {len(starts)} stages, but pp_size and the schedule need {stages}. Give the first blocks of "
            f"{stages - 1} stages; the first stage is implicit."
        )
    return tuple(zip(starts, [*starts[1:], len(blocks)], strict=True))


def _balanced_ranges(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    first: Sequence[str],
    last: Sequence[str],
    place: StagePlacement,
) -> tuple[Range, ...]:
    cost_before, cost_after = (
        sum(work(model.get_submodule(name)) for name in unit_names)
        for unit_names in (first, last)
    )
    costs = [work(block) for block in blocks]
    if not any(costs):
        costs = [1.0] * len(blocks)
    return balanced(costs, place.stages, cost_before, cost_after)


def work(module: nn.Module) -> float:
    """Estimate the cost of a module: the number of weights in its matrix products; embedding lookups cost nothing."""
    num_weights = 0.0
    for submodule in module.modules():
        if not isinstance(submodule, nn.Embedding):
            num_weights += sum(
                p.numel() for p in submodule.parameters(recurse=False) if p.ndim > 1
            )
    return num_weights


def part_of(model: nn.Module, cut: StageCut, rank: int) -> StagePart:
    """Return the part of the whole model on the rank at a pipeline position. Call before the model is partitioned."""
    keys = list(model.state_dict())
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    whole_names, copies = {}, set()
    for names_of_one in names.values():
        holders = dict.fromkeys(
            holder for name in names_of_one for holder in cut.ranks_of(name)
        )
        owner = cut.ranks_of(names_of_one[0])[0]
        if rank not in holders or rank == owner:
            continue
        copies.add(names_of_one[0])
        local_name = next(name for name in names_of_one if rank in cut.ranks_of(name))
        if local_name != names_of_one[0]:
            whole_names[local_name] = names_of_one[0]
    return StagePart(
        tuple(keys),
        frozenset(names_of_one[0] for names_of_one in names.values()),
        frozenset(key for key in keys if cut.ranks_of(key)[0] == rank),
        tuple(
            tuple(names_of_one)
            for names_of_one in names.values()
            if len(names_of_one) > 1
        ),
        whole_names,
        frozenset(copies),
    )


def shared(model: nn.Module, cut: StageCut) -> dict[str, tuple[int, ...]]:
    """Return the parameters (by first name) that several ranks hold, with the positions of those ranks."""
    holders_by_parameter: dict[int, tuple[str, dict[int, None]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        _, holders = holders_by_parameter.setdefault(id(parameter), (name, {}))
        holders.update(dict.fromkeys(cut.ranks_of(name)))
    return {
        name: tuple(sorted(holders))
        for name, holders in holders_by_parameter.values()
        if len(holders) > 1
    }


def _lists(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, _LISTS) and len(module):
            yield name or type(model).__name__


def _is_inside(name: str, unit: str) -> bool:
    return name == unit or name.startswith(f"{unit}.")


def _list_some(names: Sequence[str]) -> str:
    return (
        ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        or "none"
    )
