"""Partition of a model into pipeline stages: its list of blocks, the modules before and after them, and their ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from hasten.config.sections.parallel import PipelineParallelConfig
from hasten.errors import ConfigError, PrepareError
from hasten.extensions.pipeline.stage_plan import Range, StagePlacement, balance_ranges
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
            starts = [start for start, _ in self.ranges]
            return bisect_right(starts, index) - 1
        if any(_is_inside(name, unit_name) for unit_name in self.first):
            return 0
        if any(_is_inside(name, unit_name) for unit_name in self.last):
            return len(self.ranges) - 1
        return None

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Return the positions along the pipeline of the ranks that hold a name."""
        stage = self.stage_of(name)
        if stage is None:
            return tuple(range(self.place.ranks))
        return (self.place.rank_of(stage),)


def decide_cut(
    model: nn.Module, config: PipelineParallelConfig, stage_placement: StagePlacement
) -> StageCut:
    """Return the partition of the model. Raises: ConfigError or PrepareError, with advice, if it cannot be partitioned."""
    container_name = _find_container(model, config, stage_placement.stages)
    blocks_by_name = dict(model.get_submodule(container_name).named_children())
    _check_length(container_name, len(blocks_by_name), stage_placement)
    first_units, last_units = _split_outside_units(model, container_name, config)
    stage_ranges = _ranges_of_points(
        config.split_points, list(blocks_by_name), stage_placement.stages
    ) or _balanced_ranges(
        model, list(blocks_by_name.values()), first_units, last_units, stage_placement
    )
    return StageCut(
        container_name,
        tuple(blocks_by_name),
        stage_ranges,
        first_units,
        last_units,
        stage_placement,
    )


def _find_container(
    model: nn.Module, config: PipelineParallelConfig, num_stages: int
) -> str:
    model_name = type(model).__name__
    if config.split_points:
        parent_names = {
            split_point.rpartition(".")[0] for split_point in config.split_points
        }
        for split_point in config.split_points:
            parent_list = dict(model.named_modules()).get(
                split_point.rpartition(".")[0]
            )
            if not isinstance(parent_list, _LISTS) or split_point.rpartition(".")[
                2
            ] not in dict(parent_list.named_children()):
                raise ConfigError(
                    f"pp_handler.split_points names {split_point!r}, which is not a member of a ModuleList or Sequential of "
                    f"{model_name}; a stage must start with a block of such a list. Its lists are: {_list_some(list(_block_lists(model)))}."
                )
        if len(parent_names) > 1:
            raise ConfigError(
                f"pp_handler.split_points names blocks of {len(parent_names)} lists ({', '.join(sorted(parent_names))}), but stages exchange the "
                "output of blocks of one list. Name blocks of one list."
            )
        return parent_names.pop()
    block_lists = dict.fromkeys(
        list_path.rpartition(".")[0] for list_path, _ in repeated_blocks(model)
    )
    outermost_lists = []
    for list_path in block_lists:
        outer_paths = block_lists.keys() - {list_path}
        if not any(_is_inside(list_path, outer_path) for outer_path in outer_paths):
            outermost_lists.append(list_path)
    if isinstance(model, nn.Sequential) and (
        not outermost_lists or len(model) >= num_stages
    ):
        return ""
    if len(outermost_lists) == 1:
        return outermost_lists[0]
    if not outermost_lists:
        reason = "no list of repeated blocks"
    else:
        reason = f"several lists of blocks ({', '.join(outermost_lists)})"
    raise PrepareError(
        f"{model_name} has {reason}, so it is unclear how to split it into {num_stages} stages. A pipeline needs one ModuleList or Sequential whose "
        "blocks pass on one tensor; name the first blocks of the stages in pp_handler.split_points, or "
        "use tp_size or dp_shard_size for this model."
    )


def _check_length(
    container_name: str, num_blocks: int, stage_placement: StagePlacement
) -> None:
    if num_blocks < stage_placement.stages:
        raise ConfigError(
            f"{container_name or 'the model'!r} has {num_blocks} blocks, fewer than the {stage_placement.stages} stages that pp_size="
            f"{stage_placement.ranks} with {stage_placement.per_rank} on each rank requires; a stage needs at least one block. Use pp_size up to "
            f"{num_blocks // stage_placement.per_rank}."
        )


def _split_outside_units(
    model: nn.Module, container_name: str, config: PipelineParallelConfig
) -> tuple[tuple[str, ...], ...]:
    """Return the modules with state outside the blocks: those before the blocks, and those after them."""
    first_units: list[str] = []
    last_units: list[str] = []
    for unit_name, runs_before in _units_outside(model, container_name):
        if unit_name in config.first_stage:
            runs_before = True
        elif unit_name in config.last_stage:
            runs_before = False
        (first_units if runs_before else last_units).append(unit_name)
    for setting, unit_names in (
        ("first_stage", config.first_stage),
        ("last_stage", config.last_stage),
    ):
        if unknown_names := sorted(set(unit_names) - {*first_units, *last_units}):
            raise ConfigError(
                f"pp_handler.{setting} names {unknown_names[0]!r}, which is not a module with weights outside the blocks of "
                f"{type(model).__name__}; these are: {_list_some([*first_units, *last_units])}."
            )
    return tuple(first_units), tuple(last_units)


def _units_outside(model: nn.Module, container_name: str) -> Iterator[tuple[str, bool]]:
    """Yield the outermost modules with state outside the container, and whether they are registered before it."""
    path_parts = container_name.split(".") if container_name else []
    module = model
    for depth, child_name in enumerate(path_parts):
        parent_path = ".".join(path_parts[:depth])
        is_before = True
        for child_key, child in module.named_children():
            if child_key == child_name:
                is_before = False
            elif child.state_dict():
                yield (
                    (f"{parent_path}.{child_key}" if parent_path else child_key),
                    is_before,
                )
        module = module.get_submodule(child_name)


def _ranges_of_points(
    split_points: Sequence[str] | None, block_names: Sequence[str], num_stages: int
) -> tuple[Range, ...]:
    if not split_points:
        return ()
    block_starts = []
    for split_point in split_points:
        block_starts.append(block_names.index(split_point.rpartition(".")[2]))
    start_indices = sorted(
        {
            0,
            *block_starts,
        }
    )
    if len(start_indices) != num_stages:
        raise ConfigError(
            f"pp_handler.split_points makes {len(start_indices)} stages, but pp_size and the schedule need {num_stages}. Give the first blocks of "
            f"{num_stages - 1} stages; the first stage is implicit."
        )
    return tuple(
        zip(start_indices, [*start_indices[1:], len(block_names)], strict=True)
    )


def _balanced_ranges(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    first_units: Sequence[str],
    last_units: Sequence[str],
    stage_placement: StagePlacement,
) -> tuple[Range, ...]:
    cost_before = sum(map(estimate_work, map(model.get_submodule, first_units)))
    cost_after = sum(map(estimate_work, map(model.get_submodule, last_units)))
    block_costs = list(map(estimate_work, blocks))
    if not any(block_costs):
        block_costs = [1.0] * len(blocks)
    return balance_ranges(block_costs, stage_placement.stages, cost_before, cost_after)


def estimate_work(module: nn.Module) -> float:
    """Estimate the cost of a module: the number of weights in its matrix products; embedding lookups cost nothing."""
    num_weights = 0.0
    for submodule in module.modules():
        if not isinstance(submodule, nn.Embedding):
            num_weights += sum(
                parameter.numel()
                for parameter in submodule.parameters(recurse=False)
                if parameter.ndim > 1
            )
    return num_weights


def part_of(model: nn.Module, cut: StageCut, rank: int) -> StagePart:
    """Return the part of the whole model on the rank at a pipeline position. Call before the model is partitioned."""
    state_keys = list(model.state_dict())
    names_by_parameter: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_parameter.setdefault(id(parameter), []).append(name)
    whole_names = {}
    copied_names = set()
    for names_of_one in names_by_parameter.values():
        holder_ranks = dict.fromkeys(
            holder_rank for name in names_of_one for holder_rank in cut.ranks_of(name)
        )
        owner_rank = cut.ranks_of(names_of_one[0])[0]
        if rank not in holder_ranks or rank == owner_rank:
            continue
        copied_names.add(names_of_one[0])
        local_name = next(name for name in names_of_one if rank in cut.ranks_of(name))
        if local_name != names_of_one[0]:
            whole_names[local_name] = names_of_one[0]
    return StagePart(
        tuple(state_keys),
        frozenset(names_of_one[0] for names_of_one in names_by_parameter.values()),
        frozenset(
            state_key for state_key in state_keys if cut.ranks_of(state_key)[0] == rank
        ),
        tuple(
            tuple(names_of_one)
            for names_of_one in names_by_parameter.values()
            if len(names_of_one) > 1
        ),
        whole_names,
        frozenset(copied_names),
    )


def find_shared_parameters(
    model: nn.Module, cut: StageCut
) -> dict[str, tuple[int, ...]]:
    """Return the parameters (by first name) that several ranks hold, with the positions of those ranks."""
    holders_by_parameter: dict[int, tuple[str, dict[int, None]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        _, holder_ranks = holders_by_parameter.setdefault(id(parameter), (name, {}))
        holder_ranks.update(dict.fromkeys(cut.ranks_of(name)))
    return {
        name: tuple(sorted(holder_ranks))
        for name, holder_ranks in holders_by_parameter.values()
        if len(holder_ranks) > 1
    }


def _block_lists(model: nn.Module) -> Iterator[str]:
    for module_name, module in model.named_modules():
        if isinstance(module, _LISTS) and len(module):
            yield module_name or type(model).__name__


def _is_inside(name: str, unit_name: str) -> bool:
    return name == unit_name or name.startswith(f"{unit_name}.")


def _list_some(names: Sequence[str]) -> str:
    remainder = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + remainder or "none"
