"""Values that make up a checkpoint: slices of tensors, components, files; and the protocols that a store implements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from torch import Tensor

from hasten.checkpoint.format.manifest import FileRecord, Manifest

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Format = Literal["safetensors", "torch"]


@dataclass(frozen=True, slots=True)
class Slice:
    """A local piece of a global tensor, with the position needed to reshard it on load.

    `owned` is False when another rank holds the same piece and writes it.
    """

    data: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    owned: bool = True
    axes: tuple[str, ...] = ()
    """Mesh axes that the tensor is distributed over; empty for other tensors."""
    first: bool = True
    """True if this rank is the first on that mesh to hold the piece; other meshes of the same kind may exist."""


@dataclass(frozen=True, slots=True)
class Component:
    """One named entry of a checkpoint: tensors (whole or sliced) and JSON, nothing that needs pickle.

    A component is the same on every rank (or sliced over the ranks), unless `per_rank` is set: then each rank
    saves a separate one. `main_only` names the tensors that only the main rank writes (buffers under DDP).
    """

    tensors: Mapping[str, Tensor | Slice] = field(default_factory=dict)
    data: Json = None
    kind: str = "object"
    format: Format = "safetensors"
    per_rank: bool = False
    main_only: frozenset[str] = frozenset()

    @property
    def sliced(self) -> bool:
        """True if any tensor is a piece of a larger one."""
        return Slice in map(type, self.tensors.values())


@dataclass(frozen=True, slots=True)
class StateTree:
    """All components that one save writes, by name (`model`, `optimizer`, `scheduler`, `random_states`, ...)."""

    components: Mapping[str, Component] = field(default_factory=dict)

    def __or__(self, other_tree: StateTree) -> StateTree:
        """Return the union of both trees; a name must not appear twice."""
        shared_names = set(self.components) & set(other_tree.components)
        assert not shared_names, f"components named twice: {sorted(shared_names)}"
        return StateTree({**self.components, **other_tree.components})


def local_data(tensor: Tensor | Slice) -> Tensor:
    """Return the tensor this rank holds."""
    return tensor.data if isinstance(tensor, Slice) else tensor


@dataclass(frozen=True, slots=True)
class Blob:
    """The bytes of one file, as a sequence of byte strings and dense tensors."""

    segments: Sequence[bytes | Tensor]
    size: int


class Draft(Protocol):
    """A checkpoint being written: invisible to readers until `commit` returns."""

    name: str
    token: str
    """Token that another rank needs, besides the name, to join this draft."""
    keeps_exports: bool
    """False if the save may replace an exported model in its folder."""

    @property
    def folder(self) -> Path | None:
        """Folder in which hooks may create files; None when the store is not a folder."""
        ...

    def put(self, files: Mapping[str, Blob]) -> dict[str, FileRecord]:
        """Write files in parallel; they are durable when this returns. Ranks: each rank writes its files."""
        ...

    def hook_files(self, written_names: Sequence[str]) -> list[FileRecord]:
        """Return the records of files that hooks created in the draft, after making them durable. Ranks: main only."""
        ...

    def commit(self, manifest: Manifest) -> None:
        """Make the checkpoint visible atomically. Ranks: main only, after every rank has voted."""
        ...

    def abort(self) -> None:
        """Delete the draft. Ranks: main only."""
        ...


class CheckpointStore(Protocol):
    """Storage that holds committed checkpoints by name."""

    @property
    def address(self) -> str:
        """The folder or URL, for error messages."""
        ...

    @property
    def remote(self) -> bool:
        """True if files have to be downloaded before they can be read."""
        ...

    def begin(self, name: str) -> Draft:
        """Return a new draft, after removing leftovers of interrupted saves. Ranks: main only."""
        ...

    def begin_numbered(self, at_least: int) -> Draft:
        """Return a new draft with the next free number, which no other process gets. Ranks: main only."""
        ...

    def join(self, name: str, token: str) -> Draft | None:
        """Return the draft that main started; None when this process does not see it (another disk)."""
        ...

    def names(self) -> list[str]:
        """Return the names of all entries that look like a checkpoint, complete or not."""
        ...

    def manifest(self, name: str) -> Manifest:
        """Return the verified manifest. Raises: a CheckpointError that describes the problem."""
        ...

    def check(self, name: str) -> Manifest:
        """Return the manifest after checking that every file has its size (checksums are not read).

        Raises: a CheckpointError that describes the problem.
        """
        ...

    def is_current(
        self, name: str, manifest: Manifest, folder: Path | None = None
    ) -> bool:
        """Return True if the checkpoint has not been replaced since its manifest, and its folder if given, were read."""
        ...

    def fetch(self, name: str, manifest: Manifest) -> AbstractContextManager[Path]:
        """Return a context manager that provides a local folder with the files of the manifest."""
        ...

    def delete(self, name: str) -> None:
        """Remove a checkpoint, so that no reader ever sees it incomplete."""
        ...
