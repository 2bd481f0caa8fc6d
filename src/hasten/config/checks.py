"""Checks of settings: problems collected for the user, contradictions as functions from settings to errors, and settings without effect."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib import import_module
from math import prod
from operator import itemgetter
from types import MappingProxyType
from typing import Final, get_args

from hasten.config.base import Absent, default_of
from hasten.config.root import Config
from hasten.config.schema import BY_PATH, SECTIONS
from hasten.config.sections.loop import DynamoBackend
from hasten.config.source import DEFAULT, Path, SettingEntry, dotted_name, shown
from hasten.errors import ConfigError, ContradictionError, SettingValueError
from hasten.extension import offers

_MOST_SHOWN: Final = 50


@dataclass(slots=True)
class Problems:
    """Collected errors in the settings, reported to the user all at once."""

    found: list[ConfigError] = field(default_factory=list)

    @property
    def worth_a_hint(self) -> bool:
        """True if the next problem will be shown, since finding the nearest name takes milliseconds."""
        return len(self.found) < _MOST_SHOWN

    def add(self, error: ConfigError) -> None:
        """Add one problem, or the several inside a collected one."""
        self.found.extend(error.problems or (error,))

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Context manager that records a ConfigError raised in its block."""
        try:
            yield
        except ConfigError as error:
            self.add(error)

    def settle(self) -> None:
        """Raise the recorded problems: a single one as itself, several as one ConfigError that lists them."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            self.found.sort(key=_line_number)
            lines = "\n".join(
                f"  {number}. {error}"
                for number, error in enumerate(self.found[:_MOST_SHOWN], start=1)
            )
            if (num_hidden := len(self.found) - _MOST_SHOWN) > 0:
                lines += f"\n  … and {num_hidden} more"
            raise ConfigError(
                f"{len(self.found)} settings are wrong:\n{lines}",
                problems=tuple(self.found),
            )


def _line_number(error: ConfigError) -> int:
    """Return the line number of the file at the start of a message; 0 for others."""
    line_match = re.match(r"[^\n]*?:(\d+): ", str(error))
    return int(line_match[1]) if line_match else 0


def nearest_name(setting_name: str, names: Iterable[str]) -> str:
    """Return the most similar name, or an empty string if none is similar."""
    similar_names = get_close_matches(
        setting_name.lower(), list(names), n=1, cutoff=0.6
    )
    return similar_names[0] if similar_names else ""


Winners = dict[Path, SettingEntry]
Shadowed = dict[Path, tuple[SettingEntry, ...]]

EXCLUSIVE_DEVICES: Final[tuple[Path, ...]] = (
    ("cpu",),
    ("launch", "multi_gpu"),
    ("launch", "tpu"),
)
ENGINES: Final = MappingProxyType(
    {
        path[0]: section.section_names.strategy
        for path, section in SECTIONS.items()
        if section.section_names.strategy
    }
)
"""Strategy of each section that belongs to a single one."""
_EXCLUSIVE: Final = frozenset({"launch", *ENGINES})
"""Sections without which there is nothing to choose between."""


def settle_choices(
    winning_entries: Winners, overridden_entries: Shadowed, problems: Problems
) -> tuple[Winners, Shadowed, list[str]]:
    """Return the entries after exclusive choices were made, with notes about the choices."""
    if _EXCLUSIVE.isdisjoint(map(itemgetter(0), winning_entries)):
        return winning_entries, overridden_entries, []
    winning_entries = dict(winning_entries)
    overridden_entries = dict(overridden_entries)
    notes = list[str]()
    _choose_device(winning_entries, overridden_entries, notes, problems)
    _infer_strategy(winning_entries, notes)
    _refuse_unused_engines(winning_entries, notes, problems)
    return winning_entries, overridden_entries, notes


def _choose_device(
    winning_entries: Winners,
    overridden_entries: Shadowed,
    notes: list[str],
    problems: Problems,
) -> None:
    """Select one of cpu, multi_gpu and tpu, which are mutually exclusive."""
    device_entries = [
        winning_entries[setting_path]
        for setting_path in EXCLUSIVE_DEVICES
        if setting_path in winning_entries and winning_entries[setting_path].value
    ]
    if len(device_entries) < 2:
        return
    device_entries.sort(
        key=lambda entry: (entry.source.level, not entry.weak), reverse=True
    )
    strongest_entry = device_entries[0]
    for weaker_entry in device_entries[1:]:
        if (weaker_entry.source.level, weaker_entry.weak) == (
            strongest_entry.source.level,
            strongest_entry.weak,
        ):
            problems.add(
                entry_contradiction(
                    strongest_entry,
                    weaker_entry,
                    "training runs in one place",
                    "keep one",
                )
            )
            continue
        del winning_entries[weaker_entry.path]
        overridden_entries[weaker_entry.path] = (
            weaker_entry,
            *overridden_entries.get(weaker_entry.path, ()),
        )
        notes.append(
            f"{strongest_entry.name} ({strongest_entry.source}) outranks {weaker_entry.name} ({weaker_entry.source})"
        )


def _infer_strategy(winning_entries: Winners, notes: list[str]) -> None:
    """Choose the strategy whose options were given, if none was named."""
    if ("strategy",) in winning_entries and winning_entries[
        ("strategy",)
    ].value != "auto":
        return
    # Stale variables are too weak a hint to shard a model; files, flags and code are not.
    engine_entries = [
        entry
        for entry in _engine_entries(winning_entries)
        if entry.source.kind != "environment"
    ]
    if len({entry.path[0] for entry in engine_entries}) == 1:
        engine_entry = engine_entries[0]
        value = ENGINES[engine_entry.path[0]]
        winning_entries[("strategy",)] = replace(
            engine_entry, path=("strategy",), value=value, said="strategy", weak=True
        )
        notes.append(
            f"strategy: {value} is chosen because {engine_entry.spelled} is given ({engine_entry.source})"
        )
    elif len({entry.path[0] for entry in engine_entries}) > 1:
        pass  # _settle_engines reports the conflict
    elif (tpu := winning_entries.get(("launch", "tpu"))) and tpu.value:
        winning_entries[("strategy",)] = replace(
            tpu, path=("strategy",), value="xla", said="strategy", weak=True
        )


def _refuse_unused_engines(
    winning_entries: Winners, notes: list[str], problems: Problems
) -> None:
    """Refuse options of an engine that is not used; those of weaker sources, such as a file, are ignored with a note."""
    strategy = winning_entries.get(("strategy",))
    engine_entries = _engine_entries(winning_entries)
    if strategy is None or strategy.value == "auto":
        first_entry = next(
            (entry for entry in engine_entries if entry.source.kind != "environment"),
            None,
        )
        for engine_entry in engine_entries:
            if (
                first_entry
                and engine_entry.path[0] != first_entry.path[0]
                and engine_entry.source.level == first_entry.source.level
            ):
                why = "one strategy trains a model"
                problems.add(
                    entry_contradiction(
                        first_entry,
                        engine_entry,
                        why,
                        "remove one, or name the strategy",
                    )
                )
                return
        return
    for entry in engine_entries:
        if (
            ENGINES[entry.path[0]] == strategy.value
            or entry.source.kind == "environment"
        ):
            continue
        if entry.source.level >= strategy.source.level:
            why = f"{entry.path[0]} options have no effect under strategy {strategy.value}"
            problems.add(
                entry_contradiction(
                    strategy,
                    entry,
                    why,
                    f"set strategy: {entry.path[0]} or remove {entry.spelled}",
                )
            )
            return
        note_text = f"{entry.path[0]} options of {entry.source} rest: strategy is {strategy.value} ({strategy.source})"
        if not any(note.startswith(f"{entry.path[0]} options") for note in notes):
            notes.append(note_text)


def _engine_entries(winning_entries: Winners) -> list[SettingEntry]:
    return [
        entry
        for setting_path, entry in winning_entries.items()
        if setting_path[0] in ENGINES
        and setting_path in BY_PATH
        and entry.value != BY_PATH[setting_path].default
    ]


def entry_contradiction(
    first_entry: SettingEntry, second_entry: SettingEntry, why: str, remedy: str
) -> ContradictionError:
    """Return the error for two contradictory settings, naming both values and both sources."""
    return ContradictionError(
        f"{first_entry.name}: {shown(first_entry.value)} ({first_entry.source}) contradicts {second_entry.name}: {shown(second_entry.value)} "
        f"({second_entry.source}): {why}; {remedy}."
    )


Entries = Mapping[Path, SettingEntry]
Rule = Callable[[Config, Entries], Iterator[ConfigError]]


def find_contradictions(config: Config, entries: Entries) -> list[ConfigError]:
    """Return the errors for all contradictions in the settings."""
    errors: list[ConfigError] = []
    given_sections = set[str]()
    for setting_path in entries:
        given_sections.add(setting_path[0])
    for section, rules in RULES.items():
        for rule in rules if section in given_sections else ():
            errors += rule(config, entries)
    for (setting_name, *_), section_class in SECTIONS.items():
        if setting_name in given_sections and section_class.section_names.rules:
            module_name, _, attribute = section_class.section_names.rules.partition(":")
            # the section's module cannot import this one
            for rule in getattr(import_module(module_name), attribute):
                errors += rule(config, entries)
    return errors


def at(config: Config, entries: Entries, setting_name: str) -> SettingEntry:
    """Return the entry of a setting, created from the default if it was not given."""
    setting_path = tuple(setting_name.split("."))
    value: object = config
    for name_part in setting_path:
        value = getattr(value, name_part)
    return entries.get(setting_path) or SettingEntry(setting_path, value, DEFAULT)


def setting_contradiction(
    config: Config,
    entries: Entries,
    first_entry: str,
    second_entry: str,
    why: str,
    remedy: str,
) -> ContradictionError:
    """Return the error for two contradictory settings, given by their dotted names."""
    return entry_contradiction(
        at(config, entries, first_entry), at(config, entries, second_entry), why, remedy
    )


def check_precision(config: Config, entries: Entries) -> Iterator[ConfigError]:
    """Check that fp8 recipes are given with mixed_precision fp8, and for the chosen backend."""
    recipes = [
        entry
        for setting_path, entry in entries.items()
        if setting_path[0] == "fp8" and entry.source.kind != "environment"
    ]
    precision_entry = at(config, entries, "mixed_precision")
    if (
        recipes
        and config.mixed_precision != "fp8"
        and recipes[0].source.level >= precision_entry.source.level
    ):
        why = "an fp8 recipe has an effect under fp8 only"
        remedy = "set mixed_precision: fp8"
        yield entry_contradiction(precision_entry, recipes[0], why, remedy)
    for backend, other_backend in (("ao", "te"), ("te", "ao")):
        other_recipes = [
            setting_path
            for setting_path in entries
            if setting_path[:2] == ("fp8", other_backend)
        ]
        if config.fp8.backend == backend and other_recipes:
            setting_name = dotted_name(other_recipes[0])
            why = f"{setting_name} belongs to the other implementation"
            yield setting_contradiction(
                config, entries, "fp8.backend", setting_name, why, "keep one"
            )


def check_processes(config: Config, entries: Entries) -> Iterator[ConfigError]:
    """Check that the numbers of machines, processes and devices fit each other."""
    launch = config.launch
    count = "launch.num_processes"
    machines = "launch.num_machines"
    if launch.num_processes and launch.num_processes < launch.num_machines:
        why = "every machine needs a process"
        yield setting_contradiction(
            config, entries, count, machines, why, "raise num_processes"
        )
    if (
        launch.machine_rank is not None
        and launch.machine_rank >= launch.num_machines
        and not launch.nnodes
    ):
        why = "machines are numbered from 0"
        remedy = f"give a machine_rank from 0 to {launch.num_machines - 1}"
        yield setting_contradiction(
            config, entries, "launch.machine_rank", machines, why, remedy
        )
    if (
        launch.nnodes
        and launch.num_machines > 1
        and launch.nnodes != str(launch.num_machines)
    ):
        why = "both say how many machines there are"
        yield setting_contradiction(
            config, entries, "launch.nnodes", machines, why, "keep one"
        )
    if launch.num_processes and launch.num_processes > 1 and config.strategy == "none":
        why = "strategy none trains in one process"
        yield setting_contradiction(
            config, entries, "strategy", count, why, "set strategy: ddp"
        )
    if launch.module and launch.no_python:
        why = "a module is run by Python"
        setting_names = "launch.module", "launch.no_python"
        yield setting_contradiction(config, entries, *setting_names, why, "keep one")


def check_devices(config: Config, entries: Entries) -> Iterator[ConfigError]:
    """Check that enough devices are named, each once, and none for the CPU."""
    launch = config.launch
    ids = config.launch.gpu_ids
    if isinstance(ids, str):
        return
    named = at(config, entries, "launch.gpu_ids")
    cpu = at(config, entries, "cpu")
    if config.cpu and named.source.level >= cpu.source.level:
        yield entry_contradiction(
            cpu, named, "the CPU has no device numbers", "remove one"
        )
    if (
        not config.cpu
        and launch.num_machines == 1
        and launch.num_processes
        and launch.num_processes > len(ids)
    ):
        count = at(config, entries, "launch.num_processes")
        why = "each process needs a device of its own"
        remedy = f"set num_processes: {len(ids)} or name more devices"
        yield entry_contradiction(count, named, why, remedy)
    if len(set(ids)) != len(ids):
        yield SettingValueError(
            f"{named.place}: a device is named twice; name each device once."
        )
    if ids and min(ids) < 0:
        yield SettingValueError(
            f"{named.place}: devices are counted from 0, and {min(ids)} would hide them all; name devices from 0."
        )


def check_nnodes(config: Config, entries: Entries) -> Iterator[ConfigError]:
    """Check that nnodes is a number or min:max."""
    if (text := config.launch.nnodes) is None:
        return
    low, _, high = text.partition(":")
    if (
        not low.isdigit()
        or (high and not high.isdigit())
        or not 1 <= int(low) <= int(high or low)
    ):
        entry = at(config, entries, "launch.nnodes")
        yield SettingValueError(
            f"{entry.place}: expected a number or min:max, such as 1:2."
        )


def check_mesh(config: Config, entries: Entries) -> Iterator[ConfigError]:
    """Check that the sizes of the mesh divide the number of processes."""
    axes = ("dp_replicate", "dp_shard", "tp", "cp", "sp", "pp")
    sizes = {
        f"{axis}_size": getattr(config.parallelism, f"{axis}_size") for axis in axes
    }
    filled_axes = [
        f"parallelism.{setting_name}"
        for setting_name, size in sizes.items()
        if size == -1
    ]
    if len(filled_axes) > 1:
        why = "only one axis can take what is left"
        first_entry, second_entry, *_ = filled_axes
        yield setting_contradiction(
            config, entries, first_entry, second_entry, why, "give one of them a number"
        )
        return
    num_processes = config.launch.num_processes
    fixed_sizes = {
        setting_name: size for setting_name, size in sizes.items() if size and size > 1
    }
    if not num_processes or not fixed_sizes or config.launch.nnodes:
        return
    product = prod(fixed_sizes.values())
    open_sizes = (sizes["dp_replicate_size"], sizes["dp_shard_size"])
    has_open_axis = bool(filled_axes) or None in open_sizes
    if num_processes % product or (not has_open_axis and num_processes != product):
        shape = " × ".join(
            f"{setting_name} {size}" for setting_name, size in fixed_sizes.items()
        )
        largest = max(fixed_sizes, key=lambda setting_name: fixed_sizes[setting_name])
        yield setting_contradiction(
            config,
            entries,
            f"parallelism.{largest}",
            "launch.num_processes",
            f"{shape} = {product} does not fit {num_processes} processes",
            f"use {'a multiple of ' if has_open_axis else ''}{product} processes",
        )


def check_strategy_axes(config: Config, entries: Entries) -> Iterator[ConfigError]:
    """Check that the strategy supports the mesh axes."""
    sizes = config.parallelism
    shard, cp, sp = (
        f"parallelism.{setting_name}"
        for setting_name in ("dp_shard_size", "cp_size", "sp_size")
    )
    if config.strategy == "ddp" and (sizes.dp_shard_size or 1) > 1:
        why = "ddp keeps whole copies"
        remedy = "set strategy: fsdp"
        yield setting_contradiction(config, entries, "strategy", shard, why, remedy)
    if sizes.cp_size > 1 and sizes.sp_size > 1:
        yield setting_contradiction(
            config, entries, cp, sp, "both split the sequence", "keep one"
        )
    engine_axes = _mesh_settings(config.strategy)
    if sizes.sp_size > 1 and config.strategy != "auto" and "sp_size" not in engine_axes:
        why = "sequence parallelism of this kind is DeepSpeed's"
        yield setting_contradiction(
            config, entries, "strategy", sp, why, "set strategy: deepspeed"
        )
    if config.strategy in offers("strategies"):
        for setting_name in ("tp_size", "pp_size", "ep_size", "cp_size"):
            if getattr(sizes, setting_name) != 1 and setting_name not in engine_axes:
                why = f"{config.strategy} lays out its own processes"
                remedy = "use the strategy's own options, or strategy: fsdp"
                axis = f"parallelism.{setting_name}"
                yield setting_contradiction(
                    config, entries, "strategy", axis, why, remedy
                )


def _mesh_settings(strategy: str) -> tuple[str, ...]:
    """Return the degrees of `parallelism` that an engine supports."""
    for section in SECTIONS.values():
        if section.section_names.strategy == strategy:
            return section.section_names.mesh_settings
    return ()


def check_fsdp(config: Config, entries: Entries) -> Iterator[ConfigError]:
    """Check that wrap policies have the option they need and no other."""
    policy = "fsdp.auto_wrap_policy"
    size = "fsdp.min_num_params"
    policy_name = config.fsdp.auto_wrap_policy
    if config.fsdp.transformer_cls_names_to_wrap and policy_name in (
        "size_based_wrap",
        "no_wrap",
    ):
        setting_names = "fsdp.transformer_cls_names_to_wrap"
        why = "class names need the transformer policy"
        yield setting_contradiction(
            config, entries, policy, setting_names, why, "set transformer_based_wrap"
        )
    # Accelerate's files contain a size beside any policy; Accelerate never read it there.
    size_entry = at(config, entries, size)
    if (
        config.fsdp.min_num_params
        and policy_name in ("transformer_based_wrap", "no_wrap")
        and size_entry.source.kind != "environment"
        and not size_entry.said
    ):
        remedy = "set size_based_wrap or remove the size"
        yield setting_contradiction(
            config, entries, policy, size, "a size needs the size policy", remedy
        )
    recompute = "fsdp.activation_checkpointing"
    if (
        config.fsdp.activation_checkpointing_offload
        and not config.fsdp.activation_checkpointing
    ):
        remedy = "set activation_checkpointing: true"
        offload = f"{recompute}_offload"
        yield setting_contradiction(
            config, entries, offload, recompute, "nothing is recomputed", remedy
        )


def check_compilation(config: Config, entries: Entries) -> Iterator[ConfigError]:
    """Check that options of compilation are given with compilation, and either a mode or options."""
    backend = at(config, entries, "dynamo.backend")
    regional = "use_regional_compilation"
    if config.dynamo.backend == "no":
        for setting_name in ("fullgraph", regional, "compile_loss", "options"):
            entry = at(config, entries, f"dynamo.{setting_name}")
            if entry.value and entry.source.kind != "environment":
                remedy = "set dynamo.backend: inductor"
                yield entry_contradiction(entry, backend, "nothing is compiled", remedy)
    elif config.dynamo.options is not None and config.dynamo.mode != "default":
        why = "torch.compile takes a mode or options"
        setting_names = "dynamo.mode", "dynamo.options"
        yield setting_contradiction(config, entries, *setting_names, why, "keep one")
    if (
        config.dynamo.compile_loss
        and config.dynamo.backend != "no"
        and not config.dynamo.use_regional_compilation
    ):
        why = "the whole model is one graph with its loss"
        setting_names = "dynamo.compile_loss", f"dynamo.{regional}"
        yield setting_contradiction(
            config, entries, *setting_names, why, f"set {regional}"
        )
    backend_names = get_args(DynamoBackend)
    if (
        isinstance(backend.value, str)
        and backend.value not in backend_names
        and (similar_name := nearest_name(backend.value, backend_names))
    ):
        yield SettingValueError(
            f"{backend.place}: no such compiler backend; did you mean {similar_name!r}?"
        )


def check_checkpoints(config: Config, entries: Entries) -> Iterator[ConfigError]:
    """Check that a metric is given to rank the best checkpoints."""
    if config.project.keep_best and not config.project.best_metric:
        why = "the best ones are ranked by a metric"
        setting_names = "project.keep_best", "project.best_metric"
        yield setting_contradiction(
            config, entries, *setting_names, why, "name best_metric"
        )


def check_loaders(config: Config, entries: Entries) -> Iterator[ConfigError]:
    """Check that one process does not read for all where each has its own part of the data."""
    if config.dataloader.already_sharded and config.dataloader.dispatch_batches:
        why = "the reading process has its part of the data only"
        setting_names = "dataloader.already_sharded", "dataloader.dispatch_batches"
        yield setting_contradiction(config, entries, *setting_names, why, "remove one")


def check_comm_hooks(config: Config, entries: Entries) -> Iterator[ConfigError]:
    """Check that a communication wrapper is given with a hook that does not cast already."""
    casting_hooks = ("power_sgd", "batched_power_sgd")
    if config.ddp.comm_wrapper != "no" and config.ddp.comm_hook not in casting_hooks:
        why = "a wrapper casts around PowerSGD"
        setting_names = "ddp.comm_wrapper", "ddp.comm_hook"
        yield setting_contradiction(
            config, entries, *setting_names, why, "set comm_hook: power_sgd"
        )


RULES: Final = MappingProxyType[str, tuple[Rule, ...]](
    {
        "fp8": (check_precision,),
        "launch": (check_processes, check_devices, check_nnodes),
        "parallelism": (check_mesh, check_strategy_axes),
        "fsdp": (check_fsdp,),
        "dynamo": (check_compilation,),
        "project": (check_checkpoints,),
        "ddp": (check_comm_hooks,),
        "dataloader": (check_loaders,),
    }
)
"""The rules by the section without whose settings no rule can be broken."""


# -- settings without effect ---------------------------------------------------------------------------------------------
_CORE: Final[tuple[Absent, ...]] = (
    Absent(
        "parallelism.tp_handler.enable_async_tp",
        "this option of tensor parallelism",
        "leave it out to split layers without it",
    ),
    Absent(
        "parallelism.cp_handler.cp_comm_strategy",
        "attention around a ring of ranks",
        "use allgather, or ulysses where cp_size divides the heads",
        values=("ring", "alltoall"),
    ),
    Absent(
        "parallelism.sp_handler",
        "choosing lengths or attention kernels for sequence parallelism",
        "sequences may have any length that sp_size divides, and the kernel is that of scaled_dot_product_attention; leave it out",
    ),
    Absent(
        "fp8.te.interval",
        "an interval between scaling factors",
        "Transformer Engine computes them in every step",
    ),
    Absent(
        "gradient_accumulation.adjust_scheduler",
        "counting micro-steps in schedulers",
        "schedulers step once per update; leave it out",
    ),
)
ABSENT: Final[tuple[tuple[Path, Absent], ...]] = (
    *((tuple(row.name.split(".")), row) for row in _CORE),
    *(
        ((*path, *row.name.split(".")) if row.name else path, row)
        for path, section in SECTIONS.items()
        for row in section.absent
    ),
)
"""Settings that the schema accepts but this version does not support, each with the path of its setting or section.

Remove a row when its feature is added. `tests/arch/test_settings_act.py` checks that every setting is either read by the library
or refused by a row here.
"""


def refuse_absent(entries: Mapping[Path, SettingEntry]) -> None:
    """Raise unless this version supports every setting.

    Variables of other tools are ignored: they may set options of a strategy that was not chosen.
    Raises: ConfigError for the first unsupported setting.
    """
    for row_path, row in ABSENT:
        for setting_path, setting_entry in entries.items():
            if setting_path[: len(row_path)] != row_path or not refuses(
                row, setting_entry
            ):
                continue
            source = setting_entry.source
            if source.kind == "environment" and not source.detail.startswith("HASTEN_"):
                continue
            raise ConfigError(
                f"{setting_entry.name}={shown(setting_entry.value)} ({source}) cannot be honoured, because {row.what} is not in this version; {row.instead}."
            )


def refuses(row: Absent, setting_entry: SettingEntry) -> bool:
    """Return whether a row refuses the value of a setting below its path."""
    if setting_entry.path[-1] in row.but:
        return False
    if row.values:
        return setting_entry.value in row.values
    owner = BY_PATH[setting_entry.path].owner
    return bool(setting_entry.value != default_of(owner, setting_entry.path[-1]))
