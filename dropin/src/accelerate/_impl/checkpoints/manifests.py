"""Manifests of checkpoints whose files the original package, or a model's own export, replaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hasten.checkpoint.format.manifest import CHUNK_BYTES, MANIFEST_NAME, FileRecord
from hasten.checkpoint.store.disk import file_checksum
from hasten.checkpoint.store.occupied import read_file_records


def was_rewritten(folder: Path) -> bool:
    """Return True if another tool has replaced files of the checkpoint in a folder, or copied it without its hidden files.

    A damaged file is not a replaced one: it has kept its modification time.
    """
    try:
        saved = (folder / MANIFEST_NAME).stat().st_mtime_ns
    except OSError:
        return False
    listed_files = read_file_records(folder)
    hidden = [file_name for file_name in listed_files if file_name.startswith(".")]
    if hidden and not any((folder / file_name).exists() for file_name in hidden):
        return True
    files = [
        file
        for file_name, file in listed_files.items()
        if (folder / file_name).is_file()
    ]
    newer = [file for file in files if (folder / file.name).stat().st_mtime_ns > saved]
    return any(not _is_same(folder / file.name, file) for file in newer)


def _is_same(path: Path, file: FileRecord) -> bool:
    if path.stat().st_size != file.size:
        return False
    for index, checksum in enumerate(file.sums):
        start = index * CHUNK_BYTES
        stop = min(start + CHUNK_BYTES, file.size)
        if file_checksum(path, start, stop) != checksum:
            return False
    return True


@contextmanager
def hide_manifest(folder: Path) -> Iterator[None]:
    """Run the block with the manifest under a hidden name, so that files of the checkpoint may be replaced."""
    manifest = folder / MANIFEST_NAME
    hidden_manifest = folder / f".{MANIFEST_NAME}"
    if manifest.is_file():
        manifest.rename(hidden_manifest)
    try:
        yield
    finally:
        if hidden_manifest.is_file():
            hidden_manifest.rename(manifest)
