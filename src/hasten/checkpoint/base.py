"""The values a checkpoint is made of, and the two holes a store fits into."""

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
    """A local piece of a global tensor: enough to reshard on load.

    `owned` is False when another rank holds the same piece and is the one that writes it.
    """

    data: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    owned: bool = True
    axes: tuple[str, ...] = ()
    """The axes of the mesh that the tensor is laid out on, where it is."""
    first: bool = True
    """Whether this rank is the first on that mesh to hold the piece; there may be other meshes of the same kind."""


@dataclass(frozen=True, slots=True)
class Component:
    """One named part of a checkpoint: tensors (whole or sliced) and JSON, nothing that needs pickle.

    A component is the same on every rank (or cut into slices over the ranks), unless `per_rank` says that each rank
    keeps its own. `main_only` names the tensors of which only the main rank's copy counts (buffers under DDP).
    """

    tensors: Mapping[str, Tensor | Slice] = field(default_factory=dict)
    data: Json = None
    kind: str = "object"
    format: Format = "safetensors"
    per_rank: bool = False
    main_only: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors held on this rank."""
        return sum(num_bytes(value) for value in self.tensors.values())

    @property
    def sliced(self) -> bool:
        """Whether any tensor is a piece of a larger one."""
        return any(isinstance(value, Slice) for value in self.tensors.values())


@dataclass(frozen=True, slots=True)
class StateTree:
    """Everything one save writes, by component name (`model`, `optimizer`, `scheduler`, `random_states`, ...)."""

    components: Mapping[str, Component] = field(default_factory=dict)

    def __or__(self, other: StateTree) -> StateTree:
        """Return both trees in one; a name must not appear twice."""
        both = set(self.components) & set(other.components)
        assert not both, f"components named twice: {sorted(both)}"
        return StateTree({**self.components, **other.components})


def local_data(value: Tensor | Slice) -> Tensor:
    """Return the tensor this rank holds."""
    return value.data if isinstance(value, Slice) else value


def num_bytes(value: Tensor | Slice) -> int:
    """Return bytes this rank holds of a tensor."""
    tensor = local_data(value)
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True, slots=True)
class Blob:
    """The bytes of one file, as a list of byte strings and dense tensors that follow one another."""

    segments: Sequence[bytes | Tensor]
    size: int


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A committed checkpoint: its name inside the store, and its manifest."""

    name: str
    manifest: Manifest


class Draft(Protocol):
    """A checkpoint being written: invisible to readers until `commit` returns."""

    @property
    def name(self) -> str: ...

    @property
    def token(self) -> str:
        """What another rank needs, besides the name, to join this draft."""
        ...

    @property
    def folder(self) -> Path | None:
        """Where hooks may put files of their own; None when the store is not a folder."""
        ...

    def put(self, files: Mapping[str, Blob]) -> dict[str, FileRecord]:
        """Write files in parallel; they are durable when this returns. Ranks: each its own files."""
        ...

    def adopt(self, known: Sequence[str]) -> list[FileRecord]:
        """Records of files that hooks left in the draft, made durable. Ranks: main only."""
        ...

    def commit(self, manifest: Manifest) -> None:
        """Make the checkpoint visible, all of it at once. Ranks: main only, after every rank has voted."""
        ...

    def abort(self) -> None:
        """Throw the draft away. Ranks: main only."""
        ...


class CheckpointStore(Protocol):
    """A place that holds committed checkpoints by name."""

    @property
    def address(self) -> str:
        """The folder or URL, for messages."""
        ...

    @property
    def remote(self) -> bool:
        """Whether files have to be downloaded to be read."""
        ...

    def begin(self, name: str) -> Draft:
        """Return a new draft, after clearing away what earlier crashes of this name left. Ranks: main only."""
        ...

    def join(self, name: str, token: str) -> Draft | None:
        """Return the draft main began; None when this process does not see it (another disk)."""
        ...

    def names(self) -> list[str]:
        """Return names of everything that looks like a checkpoint, complete or not."""
        ...

    def manifest(self, name: str) -> Manifest:
        """Return the verified manifest. Raises: a CheckpointError that says what is wrong."""
        ...

    def complete(self, name: str) -> bool:
        """Return whether the manifest is readable and every file has its size (checksums are not read)."""
        ...

    def fetch(self, name: str, files: Sequence[FileRecord]) -> AbstractContextManager[Path]:
        """Return a local folder with these files, for the time of the block."""
        ...

    def delete(self, name: str) -> None:
        """Remove a checkpoint, so that no reader ever sees a part of it."""
        ...
