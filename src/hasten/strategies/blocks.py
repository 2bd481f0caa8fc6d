"""Search for the repeated blocks of a model, which are compiled, recomputed or sharded one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from torch import nn

from hasten.errors import ConfigError
from hasten.runtime.logs import get_logger

log = get_logger(__name__)


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the outermost blocks that occur several times in one ModuleList or Sequential, such as a transformer's layers."""
    return list(_walk_repeated(model, ""))


def _walk_repeated(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        block = _common_class(module)
    else:
        block = None
    for child_name, child in module.named_children():
        path = f"{prefix}.{child_name}" if prefix else child_name
        if block is not None and isinstance(child, block):
            yield path, child
        else:
            yield from _walk_repeated(child, path)


def _common_class(container: nn.Module) -> type[nn.Module] | None:
    """Return the most common class among the children that have submodules, if several children share it."""
    counts = Counter(
        type(child) for child in container.children() if any(child.children())
    )
    if not counts:
        return None
    kind, number = counts.most_common(1)[0]
    return kind if number > 1 else None


def blocks_by_class(
    model: nn.Module, names: Collection[str], setting: str
) -> list[nn.Module]:
    """Return every submodule whose class is named in `names`.

    A run may have several models, so each needs only one of the names; a warning lists the names that a model lacks.
    Raises: ConfigError with the model's classes when no name matches.
    """
    matching_modules = []
    for module in model.modules():
        if type(module).__name__ in names:
            matching_modules.append(module)
    missing_names = ", ".join(
        sorted(set(names) - {type(module).__name__ for module in matching_modules})
    )
    if not matching_modules:
        present_names = ", ".join(
            sorted({type(module).__name__ for module in model.modules()})
        )
        raise ConfigError(
            f"{setting} names {missing_names}, but {type(model).__name__} has no module of that class, so the setting would have no effect; "
            f"its classes are {present_names}."
        )
    if missing_names:
        log.warning(
            "%s names %s, which %s does not have",
            setting,
            missing_names,
            type(model).__name__,
        )
    return matching_modules
