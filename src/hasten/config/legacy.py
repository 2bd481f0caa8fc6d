"""Translation of FSDP1 options to FSDP2, each with a note."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from hasten.config.base import fit
from hasten.config.decode import Mismatch, decode, to_bool
from hasten.config.sections.parallel import FullyShardedDataParallelPlugin
from hasten.config.source import SettingEntry, SettingSource
from hasten.errors import SettingValueError, UnknownSettingError

Translation = tuple[list[SettingEntry], list[str]]

_STRATEGIES: Final = MappingProxyType(
    {
        "1": ("FULL_SHARD", True, False),
        "2": ("SHARD_GRAD_OP", False, False),
        "3": ("NO_SHARD", None, False),
        "4": ("HYBRID_SHARD", True, True),
        "5": ("HYBRID_SHARD_ZERO2", False, True),
    }
)
_RENAMED: Final = MappingProxyType(
    {
        "offload_params": "cpu_offload",
        "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
    }
)


def _translate_strategy(fsdp_entry: SettingEntry) -> Translation:
    strategy_word = (
        str(fsdp_entry.value)
        .strip()
        .upper()
        .lstrip("_")
        .removeprefix("SHARDINGSTRATEGY.")
    )
    by_name = {
        option_name: row for row in _STRATEGIES.values() for option_name in (row[0],)
    }
    row = _STRATEGIES.get(strategy_word) or by_name.get(strategy_word)
    if row is None:
        names = ", ".join(by_name)
        raise SettingValueError(
            f"{fsdp_entry.place}: not a sharding strategy; give one of {names} (or 1 to 5)."
        )
    option_name, reshard, hybrid = row
    if reshard is None:
        raise SettingValueError(
            f"{fsdp_entry.place}: NO_SHARD keeps the whole model on every process, which is plain data parallel and not "
            "FSDP; set strategy: ddp (distributed_type: MULTI_GPU) instead."
        )
    derived_entries = [_derived_entry(fsdp_entry, "reshard_after_forward", reshard)]
    words = f"reshard_after_forward: {str(reshard).lower()}"
    if hybrid:
        derived_entries.append(_derived_entry(fsdp_entry, "hybrid_shard", True))
        words += ", hybrid_shard: true"
    return derived_entries, [f"{fsdp_entry.spelled} {option_name} is FSDP2's {words}"]


def _translate_reshard(fsdp_entry: SettingEntry) -> Translation:
    """Accept the name of a strategy instead of a boolean, as in older files."""
    if isinstance(fsdp_entry.value, str):
        try:
            decode(fsdp_entry.value, bool | int, text=True)
        except Mismatch:
            derived_entries, sentences = _translate_strategy(fsdp_entry)
            return [
                replace(derived_entry, weak=False) for derived_entry in derived_entries
            ], sentences
    return [fsdp_entry], []


def _forward_prefetch(fsdp_entry: SettingEntry) -> Translation:
    if not _is_switched_on(fsdp_entry):
        return [], []
    return [_derived_entry(fsdp_entry, "forward_prefetch_depth", 1)], [
        f"{fsdp_entry.spelled} is FSDP2's forward_prefetch_depth: 1"
    ]


def _translate_version(fsdp_entry: SettingEntry) -> Translation:
    strategy_word = str(fsdp_entry.value).strip()
    if strategy_word == "2":
        return [], []
    if strategy_word == "1":
        return [], [f"{fsdp_entry.spelled} 1 is read as FSDP2: FSDP1 is no longer used"]
    raise SettingValueError(
        f"{fsdp_entry.place}: FSDP has the versions 1 and 2; remove the setting, FSDP2 is used."
    )


def _state_dict_type(fsdp_entry: SettingEntry) -> Translation:
    if (
        isinstance(fsdp_entry.value, str)
        and fsdp_entry.value.strip().upper() == "LOCAL_STATE_DICT"
    ):
        sharded_entry = replace(fsdp_entry, value="SHARDED_STATE_DICT")
        return [sharded_entry], [
            f"{fsdp_entry.spelled} LOCAL_STATE_DICT is SHARDED_STATE_DICT: shards load on any number of processes"
        ]
    return [fsdp_entry], []


_ALWAYS: Final = MappingProxyType(
    {
        "backward_prefetch": "gathers the next block during backward",
        "backward_prefetch_policy": "gathers the next block during backward",
        "use_orig_params": "keeps the original parameters",
        "limit_all_gathers": "limits the gathers in flight",
    }
)
"""What FSDP2 always does, by the option of FSDP1 that chose it."""
_RULES: Final = MappingProxyType[str, Callable[[SettingEntry], Translation]](
    {
        "sharding_strategy": _translate_strategy,
        "reshard_after_forward": _translate_reshard,
        "forward_prefetch": _forward_prefetch,
        "version": _translate_version,
        "fsdp_version": _translate_version,
        "state_dict_type": _state_dict_type,
    }
)
OLD_NAMES: Final = (
    *(
        name
        for name in _RULES
        if name not in ("reshard_after_forward", "state_dict_type")
    ),
    *_ALWAYS,
    *_RENAMED,
)
"""Names of FSDP1 settings that hasten's FSDP section does not have."""


def translate(fsdp_entry: SettingEntry) -> Translation:
    """Return an FSDP1 setting translated to FSDP2, with notes; other settings are returned unchanged.

    Raises: SettingValueError for a value without an equivalent.
    """
    if len(fsdp_entry.path) != 2 or fsdp_entry.path[0] != "fsdp":
        return [fsdp_entry], []
    if fsdp_entry.path[1] in _RENAMED:
        return [replace(fsdp_entry, path=("fsdp", _RENAMED[fsdp_entry.path[1]]))], []
    if always := _ALWAYS.get(fsdp_entry.path[1]):
        is_prefetch = fsdp_entry.path[1].startswith("backward_prefetch")
        if fsdp_entry.value is None or (
            not is_prefetch and _is_switched_on(fsdp_entry)
        ):
            return [], []
        return [], [
            f"{fsdp_entry.spelled} has no meaning any more: FSDP2 always {always}"
        ]
    rule = _RULES.get(fsdp_entry.path[1])
    return rule(fsdp_entry) if rule else ([fsdp_entry], [])


def fsdp_from_fsdp1(
    options: Mapping[str, Any],
) -> tuple[FullyShardedDataParallelPlugin, list[str]]:
    """Return the FSDP2 plugin for FSDP1 options (with or without the prefix fsdp_), with notes about the translation.

    Raises: UnknownSettingError for an option of neither version; SettingValueError for a value without an equivalent.
    """
    values: dict[str, Any] = {}
    derived: set[str] = set()
    sentences: list[str] = []
    for key, option_value in options.items():
        option_name = key.lower().removeprefix("fsdp_")
        fsdp_entries, new_sentences = translate(
            SettingEntry(
                ("fsdp", option_name),
                option_value,
                SettingSource("code", key),
                said=key,
            )
        )
        sentences += new_sentences
        for fsdp_entry in fsdp_entries:
            field = fsdp_entry.path[1]
            if field not in FullyShardedDataParallelPlugin.__dataclass_fields__:
                raise UnknownSettingError(
                    f"{key!r} is not an option of FSDP; it would have no effect, so remove it."
                )
            if fsdp_entry.weak and field in values and field not in derived:
                continue  # also given explicitly
            (derived.add if fsdp_entry.weak else derived.discard)(field)
            values[field] = fit(
                FullyShardedDataParallelPlugin,
                field,
                fsdp_entry.value,
                f"{key}={option_value!r}",
                text=True,
            )
    return FullyShardedDataParallelPlugin(**values), sentences


def _derived_entry(
    fsdp_entry: SettingEntry, field: str, option_value: Any
) -> SettingEntry:
    return replace(
        fsdp_entry, path=("fsdp", field), value=option_value, weak=True, text=False
    )


def _is_switched_on(fsdp_entry: SettingEntry) -> bool:
    try:
        return fsdp_entry.value is not None and to_bool(fsdp_entry.value)
    except Mismatch as error:
        raise SettingValueError(
            f"{fsdp_entry.place}: expected true or false."
        ) from error
