"""What the extension offers: losses in chunks, as functions."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="chunked_loss",
    summary="losses of large vocabularies, computed for a few tokens at a time",
    public_names={
        "ChunkedCrossEntropyLoss": "hasten.extensions.chunked_loss.cross_entropy:ChunkedCrossEntropyLoss",
        "use_chunked_loss": "hasten.extensions.chunked_loss.logits:use_chunked_loss",
    },
)
