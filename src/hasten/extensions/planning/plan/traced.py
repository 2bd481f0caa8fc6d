"""Results of tracing one training step, as plain numbers: the input of all formulas. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Final, Literal

from hasten.runtime.mesh_plan import BATCH, Axis, MeshSpec, mesh_title

PrecisionName = Literal["no", "bf16", "fp16"]
FLOAT32_BYTES: Final = 4
"""Bytes of a float32 number."""


SCRIPT_SETTINGS: Final = ("mixed_precision", "gradient_accumulation_steps", "strategy")
"""Settings that plans choose, but scripts may fix in their code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterKind:
    """Parameters that are equal in everything that affects memory, and their number."""

    shape: tuple[int, ...]
    item: int = FLOAT32_BYTES
    count: int = 1
    trained: bool = True
    in_block: bool = False
    """Whether the parameter belongs to a repeated block, which is sharded separately."""
    split: int | None = None
    """The dimension that tensor parallelism splits; None for a parameter that is not split."""

    @property
    def numel(self) -> int:
        """Number of elements of one parameter."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """Memory of an optimizer: persistent state per parameter, and temporary memory during the update."""

    name: str = "AdamW"
    states: tuple[int, ...] = (4, 4)
    """Bytes per element of each state that has the parameter's shape."""
    counter_bytes: int = 4
    """Bytes of other state per parameter; on the host."""
    passing: float = 1.0
    """Bytes allocated during the update, as a fraction of the parameters' bytes."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A quantity that is linear in the number of samples: `fixed + slope * samples`."""

    fixed: float = 0.0
    slope: float = 0.0

    def cost_of(self, num_samples: float) -> float:
        """Return the quantity for the given number of samples; never negative."""
        return max(0.0, self.fixed + self.slope * num_samples)

    @classmethod
    def from_measurements(cls, one_sample: float, two_samples: float) -> LinearCost:
        """Return the line through the values for one and two samples."""
        return cls(2 * one_sample - two_samples, two_samples - one_sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One moment of forward and backward: bytes allocated besides parameters and optimizer state."""

    activations: LinearCost
    copies: LinearCost = field(default_factory=LinearCost)
    """Parameters cast to another precision, which autograd saves."""
    gradients: float = 0.0
    """Fraction of the gradients that exist at this moment, from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Forward and backward in one precision, with or without recompute."""

    precision: PrecisionName
    recompute: bool
    flops: dict[str, LinearCost]
    """Floating-point operations of matrix products, convolutions and attention, by dtype; including recomputation."""
    moved: LinearCost
    """Bytes that all other operations read and write."""
    operations: int
    moments: tuple[Moment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTrace:
    """One model and its training step."""

    name: str
    parameters: tuple[ParameterKind, ...]
    optimizer: OptimizerFacts
    variants: tuple[Variant, ...]
    num_blocks: int = 0
    block_classes: tuple[str, ...] = ()
    largest_block: int = 0
    """Number of elements in the largest block."""
    block_frozen: int = 0
    """Number of those that have no gradients."""
    split_share: float = 0.0
    """Fraction of activations that tensor parallelism splits."""
    tp_sizes: tuple[int, ...] = ()
    """Numbers of ranks over which layers can be split."""
    tp_summed: int = 0
    """Widths all-reduced over tensor-parallel ranks per forward and backward (see `bytes_plan.tensor_traffic`)."""
    sequence: int = 1
    """Tokens of one sample."""
    script_settings: tuple[tuple[str, str | int], ...] = ()
    """Settings of `OWN` that the script passes to its Accelerator, which override any file."""

    def find_variant(self, precision: str, recompute: bool) -> Variant | None:
        """Return the variant of this kind, if it was traced."""
        for variant in self.variants:
            if variant.precision == precision and variant.recompute == recompute:
                return variant
        return None

    @property
    def num_parameters(self) -> int:
        """Number of elements in all parameters."""
        return sum(kind.numel * kind.count for kind in self.parameters)

    def count_elements(
        self, *, in_block: bool | None = None, trained: bool | None = None
    ) -> int:
        """Return the number of elements in parameters, of those in or outside of blocks, trained or frozen ones."""
        return sum(
            kind.numel * kind.count
            for kind in self.parameters
            if in_block in (None, kind.in_block) and trained in (None, kind.trained)
        )

    def gathered_bytes(self, item_bytes: int, *, in_block: bool) -> int:
        """Return the bytes of unsharded parameters in or outside of blocks, in a precision of `item` bytes."""
        return sum(
            kind.numel * kind.count * item_bytes
            for kind in self.parameters
            if kind.in_block == in_block and kind.shape
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One point of the search space."""

    mesh: MeshSpec
    sharded: bool = False
    """Whether parameters are sharded (FSDP2) rather than replicated (DDP)."""
    precision: PrecisionName = "bf16"
    recompute: bool = False
    reshard: bool = True
    """Whether gathered parameters are freed after the forward."""
    offload: bool = False
    """Whether parameters, gradients and optimizer state are in host memory."""
    micro_batch: int = 1
    micro_steps: int = 1

    @property
    def strategy(self) -> str:
        """The strategy's name in settings."""
        if self.sharded:
            return "fsdp"
        return "ddp" if self.mesh.world_size > 1 else "none"

    @property
    def global_batch(self) -> int:
        """Samples in one update."""
        return self.micro_batch * self.micro_steps * self.mesh.size(*BATCH)

    @property
    def words(self) -> str:
        """Strategy and mesh, for tables."""
        axis_sizes = mesh_title(self.mesh)
        if self.reshard or not self.sharded or self.mesh.size(Axis.DP_SHARD) == 1:
            keeps_parameters = ""
        else:
            keeps_parameters = ", parameters kept"
        if axis_sizes:
            return f"{self.strategy} ({axis_sizes}{keeps_parameters})"
        return self.strategy

    @property
    def full_title(self) -> str:
        """Strategy, mesh, recompute and offload."""
        feature_titles = [self.words]
        if self.recompute:
            feature_titles.append("recompute")
        if self.offload:
            feature_titles.append("offload to host memory")
        return ", ".join(feature_titles)
