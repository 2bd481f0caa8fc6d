"""Settings that the schema accepts but this version does not support: a table, and the check that refuses them at start.

Remove a row when its feature is added. `tests/arch/test_settings_act.py` checks that every setting is either read by the library
or refused by a row here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hasten.config.base import default_of
from hasten.config.schema import BY_PATH, FIELDS
from hasten.config.source import Path, SettingEntry, shown
from hasten.errors import ConfigError

_FSDP: Final = "strategy: fsdp shards optimizer, gradients and parameters"
_MEGATRON: Final = (
    "tp_degree",
    "pp_degree",
    "num_micro_batches",
    "sequence_parallelism",
    "gradient_clipping",
    "recompute_activations",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "decoder_last_pipeline_num_layers",
    "attention_backend",
    "attention_dropout",
    "hidden_dropout",
    "attention_softmax_in_fp32",
    "seq_length",
    "use_distributed_optimizer",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "use_rotary_position_embeddings",
    "return_logits",
)
"""Options of Megatron-LM that have an effect."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A setting, or a whole section, that would have no effect."""

    name: str
    """Dotted name, such as parallelism.pp_size; a section includes everything below it."""
    what: str
    """The feature, as the subject of `… is not in this version`."""
    instead: str
    values: tuple[Any, ...] = ()  # Any: values of the setting
    """Refused values; by default all but the setting's default."""
    but: tuple[str, ...] = ()
    """Settings of the section that do have an effect."""

    @property
    def path(self) -> Path:
        """The name split at its dots."""
        return tuple(self.name.split("."))

    def refuses(self, path: Path, value: Any) -> bool:  # Any: a value of the setting
        """Return whether this value of the setting at `path` is refused."""
        if path[: len(self.path)] != self.path or path[-1] in self.but:
            return False
        info = BY_PATH[path]
        return value in self.values if self.values else bool(value != default_of(info.owner, path[-1]))


ABSENT: Final[tuple[Absent, ...]] = (
    Absent("xla.downcast_bf16", "this switch of torch_xla, which is deprecated there,", "set mixed_precision: bf16"),
    Absent(
        "xla.main_training_function",
        "starting a function of the script for each TPU core",
        "one process runs the script and drives all of them; leave it out",
    ),
    *(
        Absent(f"megatron.{name}", what, instead)
        for what, instead, names in (
            (
                "an interleaved schedule of Megatron",
                "leave it out for one stage per rank, or use pp_size with strategy: fsdp",
                ("num_layers_per_virtual_pipeline_stage",),
            ),
            (
                "a pipeline through encoder and decoder",
                "only decoders have a pipeline; leave it out",
                ("pipeline_model_parallel_split_rank",),
            ),
            (
                "sharding parameters or offloading optimizer state with Megatron",
                "use_distributed_optimizer shards masters and moments, and " + _FSDP,
                (
                    "use_custom_fsdp",
                    "use_precision_aware_optimizer",
                    "optimizer_cpu_offload",
                    "overlap_cpu_optimizer_d2h_h2d",
                ),
            ),
        )
        for name in names
    ),
    Absent(
        "megatron.attention_backend",
        "attention by Transformer Engine",
        "leave it out to use Megatron's own",
        values=("flash", "fused"),
    ),
    Absent(
        "megatron",
        "running Megatron-LM's own training loop, data and schedules",
        "the loop's optimizer, scheduler, loader and loss say it already; leave it out",
        but=_MEGATRON,
    ),
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
    Absent("fp8.te.interval", "an interval between scaling factors", "Transformer Engine computes them in every step"),
    Absent(
        "metrics.otlp_endpoint",
        "posting metrics to a collector",
        "set metrics.port, and let the collector scrape it with its Prometheus receiver",
    ),
    Absent(
        "gradient_accumulation.adjust_scheduler",
        "counting micro-steps in schedulers",
        "schedulers step once per update; leave it out",
    ),
)


_PATHS: Final = frozenset(
    info.path for row in ABSENT for path in (row.path,) for info in FIELDS if info.path[: len(path)] == path
)
"""Settings of which some values are refused."""


def is_absent(path: Path) -> bool:
    """Return whether this version supports no value of this setting but its default."""
    return any(path[: len(row.path)] == row.path and path[-1] not in row.but and not row.values for row in ABSENT)


def refused(entries: Mapping[Path, SettingEntry]) -> list[ConfigError]:
    """Return errors for settings that this version does not support; only those about strategy and launch, if any.

    Variables of other tools are ignored if they only set options of a strategy that was not chosen.
    """
    chosen = list(_complaints({path: entry for path, entry in entries.items() if path[0] in ("strategy", "launch")}))
    if chosen:
        return chosen
    ours = {p: e for p, e in entries.items() if e.source.kind != "environment" or e.source.detail.startswith("HASTEN_")}
    return list(_complaints(ours))


def check(entries: Mapping[Path, SettingEntry]) -> None:
    """Raise unless this version supports every setting.

    Raises: ConfigError for the first unsupported setting.
    """
    if not _PATHS.isdisjoint(entries) and (complaints := refused(entries)):
        raise complaints[0]


def _complaints(entries: Mapping[Path, SettingEntry]) -> Iterator[ConfigError]:
    order = {info.path: number for number, info in enumerate(FIELDS)}
    for path in sorted(entries, key=order.__getitem__):
        for row in ABSENT:
            if row.refuses(path, entries[path].value):
                place = f"{entries[path].name}={shown(entries[path].value)} ({entries[path].source})"
                yield ConfigError(
                    f"{place} cannot be honoured, because {row.what} is not in this version; {row.instead}."
                )
                break
