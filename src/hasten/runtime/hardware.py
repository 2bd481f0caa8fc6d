"""Table of accelerators: speed, memory and links, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

from hasten.errors import ConfigError

_GIB: Final = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorEntry:
    """One kind of device. Speeds are the vendor's dense peaks; `_share` fields are fractions reached by training."""

    name: str
    memory_gib: float
    """Memory that torch can allocate."""
    tflops_bf16: float
    tflops_fp32: float
    tflops_tf32: float = 0.0
    tflops_fp8: float = 0.0
    memory_gb_s: float
    node_gb_s: float
    """Speed of one device to others in its machine, in one direction."""
    network_gb_s: float
    """Speed of one device to other machines, in one direction."""
    per_node: int = 8
    host_gb_s: float = 25.0
    """Speed to and from host memory, per device."""
    matmul_share: float = 0.6
    """Fraction of the peak that matrix products of a training step reach on matrix units."""
    fp32_share: float = 0.75
    """Fraction of the peak for products in float32 without TF32, which do not use matrix units."""
    memory_share: float = 0.75
    """Fraction of the memory bandwidth that other operations reach."""
    link_share: float = 0.75
    """Fraction of the link speed that collectives reach."""
    launch_us: float = 5.0
    """Time in which the host launches one operation."""
    reserved_gib: float = 1.0
    """Memory used by the driver and by communication libraries before anything is allocated."""

    @property
    def memory_bytes(self) -> int:
        """Bytes that are left for training."""
        return int((self.memory_gib - self.reserved_gib) * _GIB)

    def peak(self, dtype: str, tf32: bool = False) -> float:
        """Return the vendor's peak of matrix products of `dtype`, in floating-point operations per second."""
        tflops_by_dtype = {
            "bf16": self.tflops_bf16,
            "fp16": self.tflops_bf16,
            "fp8": self.tflops_fp8 or self.tflops_bf16,
            "fp32": (self.tflops_tf32 or self.tflops_fp32)
            if tf32
            else self.tflops_fp32,
        }
        return tflops_by_dtype.get(dtype, self.tflops_fp32) * 1e12

    def flops(self, dtype: str, tf32: bool = False) -> float:
        """Return the floating-point operations per second that matrix products of `dtype` reach."""
        on_matrix_units = dtype in ("bf16", "fp16", "fp8") or (dtype == "fp32" and tf32)
        return self.peak(dtype, tf32) * (
            self.matmul_share if on_matrix_units else self.fp32_share
        )


def _by_name(*entries: AcceleratorEntry) -> MappingProxyType[str, AcceleratorEntry]:
    return MappingProxyType({entry.name: entry for entry in entries})


KNOWN: Final = _by_name(
    AcceleratorEntry(
        name="a100",
        memory_gib=79.1,
        tflops_bf16=312,
        tflops_fp32=19.5,
        tflops_tf32=156,
        memory_gb_s=2039,
        node_gb_s=300,
        network_gb_s=25,
        matmul_share=0.7,
    ),
    AcceleratorEntry(
        name="a100-40gb",
        memory_gib=39.4,
        tflops_bf16=312,
        tflops_fp32=19.5,
        tflops_tf32=156,
        memory_gb_s=1555,
        node_gb_s=300,
        network_gb_s=25,
        matmul_share=0.7,
    ),
    AcceleratorEntry(
        name="h100",
        memory_gib=79.2,
        tflops_bf16=989,
        tflops_fp32=67,
        tflops_tf32=494,
        tflops_fp8=1979,
        memory_gb_s=3350,
        node_gb_s=450,
        network_gb_s=50,
        host_gb_s=50,
        matmul_share=0.4,  # measured on an H200: benchmarks/results/plan_accuracy.md
        memory_share=0.53,
        fp32_share=0.72,
    ),
    AcceleratorEntry(
        name="h200",
        memory_gib=139.8,
        tflops_bf16=989,
        tflops_fp32=67,
        tflops_tf32=494,
        tflops_fp8=1979,
        memory_gb_s=4800,
        node_gb_s=450,
        network_gb_s=50,
        host_gb_s=50,
        matmul_share=0.4,  # measured on an H200: benchmarks/results/plan_accuracy.md
        memory_share=0.53,
        fp32_share=0.72,
    ),
    AcceleratorEntry(
        name="b200",
        memory_gib=178.4,
        tflops_bf16=2250,
        tflops_fp32=80,
        tflops_tf32=1100,
        tflops_fp8=4500,
        memory_gb_s=8000,
        node_gb_s=900,
        network_gb_s=50,
        host_gb_s=50,
    ),
    AcceleratorEntry(
        name="l4",
        memory_gib=22.0,
        tflops_bf16=121,
        tflops_fp32=30.3,
        tflops_tf32=60,
        tflops_fp8=242,
        memory_gb_s=300,
        node_gb_s=20,
        network_gb_s=12.5,
        host_gb_s=20,
        reserved_gib=0.6,
    ),
    AcceleratorEntry(
        name="rtx4090",
        memory_gib=23.5,
        tflops_bf16=165,
        tflops_fp32=82.6,
        tflops_tf32=82.6,
        tflops_fp8=330,
        memory_gb_s=1008,
        node_gb_s=12,
        network_gb_s=3,
        host_gb_s=20,
        reserved_gib=0.6,
    ),
    AcceleratorEntry(
        name="mi300x",
        memory_gib=191.5,
        tflops_bf16=1307,
        tflops_fp32=163,
        tflops_tf32=653,
        tflops_fp8=2614,
        memory_gb_s=5300,
        node_gb_s=448,
        network_gb_s=50,
        host_gb_s=50,
        matmul_share=0.45,
        memory_share=0.7,
    ),
    AcceleratorEntry(
        name="tpu-v5e",
        memory_gib=16.0,
        tflops_bf16=197,
        tflops_fp32=33,
        memory_gb_s=819,
        node_gb_s=100,
        network_gb_s=12.5,
        launch_us=0.0,
        reserved_gib=0.3,
    ),
)
"""Accelerators known to hasten, by name."""

_ALIASES: Final = MappingProxyType(
    {"4090": "rtx4090", "v5e": "tpu-v5e", "tpuv5e": "tpu-v5e", "a100-80gb": "a100"}
)


def find_accelerator(
    name: str, accelerators: Mapping[str, AcceleratorEntry] = KNOWN
) -> AcceleratorEntry:
    """Return the accelerator called `name`, in any spelling; product names as reported by drivers are accepted too.

    Raises: ConfigError that lists the known names.
    """
    by_plain = {}
    for accelerator_name, entry in accelerators.items():
        by_plain[_plain_name(accelerator_name)] = entry
    by_plain |= {
        _plain_name(alias): accelerators[accelerator_name]
        for alias, accelerator_name in _ALIASES.items()
        if accelerator_name in accelerators
    }
    if _plain_name(name) in by_plain:
        return by_plain[_plain_name(name)]
    name_words = re.findall("[a-z0-9]+", name.lower())
    if "40gb" in name_words and "a100" in name_words and "a100-40gb" in accelerators:
        return accelerators["a100-40gb"]
    joined_words = []
    for start in range(len(name_words)):
        for end in range(start + 1, len(name_words) + 1):
            joined_words.append("".join(name_words[start:end]))
    contained_names = [
        plain_name for plain_name in by_plain if plain_name in joined_words
    ]
    if contained_names:
        return by_plain[max(contained_names, key=len)]
    similar_names = get_close_matches(name.lower(), list(accelerators), n=1, cutoff=0.5)
    if similar_names:
        hint = f"did you mean {similar_names[0]!r}?"
    else:
        hint = f"known are {', '.join(accelerators)}."
    raise ConfigError(
        f"the accelerator {name!r} is unknown; {hint} Describe others in a YAML file and pass it with --hardware."
    )


def _plain_name(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())
