"""What the extension offers: names of `hasten.data`."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="packing",
    summary="samples of different lengths, packed into rows of a token budget",
    public_names={
        "PackedBatchSampler": "hasten.extensions.packing.packing:PackedBatchSampler",
        "PackedCollator": "hasten.extensions.packing.packing:PackedCollator",
        "num_label_tokens": "hasten.extensions.packing.packing:num_label_tokens",
        "packed_attention_mask": "hasten.extensions.packing.packing:packed_attention_mask",
        "packed_block_mask": "hasten.extensions.packing.packing:packed_block_mask",
    },
)
