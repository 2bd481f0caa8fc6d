"""Which rank of a machine writes which slice, when every machine must have all slices of its own ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hasten.checkpoint.base import Slice, StateTree
from hasten.checkpoint.rank_agreement import Agreement

Layout = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
"""Offset and local shape of every slice, by `component/name`."""


class MachineOwners:
    """The first rank of the machine that holds a slice owns it. Ranks tell each other their layouts when one has changed."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._owned: frozenset[str] = frozenset()

    def owned(self, tree: StateTree, ranks: Sequence[int], together: Agreement) -> StateTree:
        """The tree with its slices owned so; `ranks` are those of this machine. Ranks: every rank."""
        layout = {
            f"{name}/{key}": (tuple(value.offset), tuple(value.data.shape))
            for name, component in tree.components.items()
            for key, value in component.tensors.items()
            if isinstance(value, Slice)
        }
        if any(together.share(layout != self._layout)):
            layouts: list[Layout] = together.share(layout)
            me = together.comm.ranks[together.comm.rank]
            before = [layouts[rank] for rank in ranks if rank < me]
            self._owned = frozenset(key for key, at in layout.items() if all(other.get(key) != at for other in before))
            self._layout = layout
        return StateTree(
            {
                name: replace(
                    component,
                    tensors={
                        key: replace(value, owned=f"{name}/{key}" in self._owned) if isinstance(value, Slice) else value
                        for key, value in component.tensors.items()
                    },
                )
                for name, component in tree.components.items()
            }
        )
