"""What a trace of one training step found, as plain numbers: the input of every formula here. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from hasten.runtime.mesh_plan import BATCH, Axis, MeshSpec, mesh_title

PrecisionName = Literal["no", "bf16", "fp16"]
ITEM: Final = 4
"""Bytes of a number in float32."""


OWN: Final = ("mixed_precision", "gradient_accumulation_steps", "strategy")
"""Settings that plans choose and scripts may fix in their code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterKind:
    """Parameters that are alike in all that matters for memory, and how many there are."""

    shape: tuple[int, ...]
    item: int = ITEM
    count: int = 1
    trained: bool = True
    in_block: bool = False
    """Whether it belongs to a repeated block, which is sharded on its own."""
    split: int | None = None
    """The dimension that tensor parallelism divides; None for a parameter that stays whole."""

    @property
    def numel(self) -> int:
        """Numbers in one of them."""
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return self.numel * self.item * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """What an optimizer keeps of each parameter, and needs for a moment while it updates."""

    name: str = "AdamW"
    states: tuple[int, ...] = (4, 4)
    """Bytes per number of each state that has the parameter's shape."""
    counter_bytes: int = 4
    """Bytes of other state, for each parameter; on the host."""
    passing: float = 1.0
    """Bytes allocated during the update, as a share of the parameters' bytes."""


@dataclass(frozen=True, slots=True)
class Line:
    """A quantity that grows with the number of samples: `fixed + slope * samples`."""

    fixed: float = 0.0
    slope: float = 0.0

    def at(self, samples: float) -> float:
        """Return the quantity for so many samples; never negative."""
        return max(0.0, self.fixed + self.slope * samples)

    @classmethod
    def through(cls, one: float, two: float) -> Line:
        """Return the line through the values for one and two samples."""
        return cls(2 * one - two, two - one)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One moment of forward and backward: bytes alive beside parameters and optimizer state."""

    activations: Line
    copies: Line = field(default_factory=Line)
    """Parameters cast to another precision, which autograd keeps."""
    gradients: float = 0.0
    """Share of the gradients that exist by now, of 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Forward and backward in one precision, with or without recompute."""

    precision: PrecisionName
    recompute: bool
    flops: dict[str, Line]
    """Floating-point operations of matrix products, convolutions and attention, by dtype; recomputed ones included."""
    moved: Line
    """Bytes that all other operations read and write."""
    operations: int
    moments: tuple[Moment, ...]
    peak_module: str = ""
    """Where the peak of activations is."""


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
    """Numbers in the largest block."""
    split_share: float = 0.0
    """Share of activations that tensor parallelism divides."""
    block_share: float = 1.0
    """Share of activations that belongs to blocks, which a pipeline divides."""
    tp_sizes: tuple[int, ...] = ()
    """Numbers of ranks over which layers can be split."""
    tp_summed: int = 0
    """Widths summed over tensor-parallel ranks in a forward and backward (see `runtime.bytes_plan.tensor_traffic`)."""
    width: int = 0
    """Width of what blocks pass on."""
    sequence: int = 1
    """Tokens of one sample."""
    key_width: int = 0
    """Width of the keys, which context parallelism exchanges."""
    batch_size: int = 0
    """Samples in a batch of the script's own loader; 0 where there is none."""
    own: tuple[tuple[str, str | int], ...] = ()
    """Settings of `OWN` that the script gives its Accelerator itself: they win over any file."""

    def variant(self, precision: str, recompute: bool) -> Variant | None:
        """Return the variant of this kind, if it was traced."""
        return next((v for v in self.variants if v.precision == precision and v.recompute == recompute), None)

    @property
    def num_parameters(self) -> int:
        """Numbers in all parameters."""
        return sum(kind.numel * kind.count for kind in self.parameters)

    @property
    def outside_blocks(self) -> int:
        """Numbers in parameters that are in no block."""
        return sum(kind.numel * kind.count for kind in self.parameters if not kind.in_block)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One point of the search."""

    mesh: MeshSpec
    sharded: bool = False
    """Whether parameters are sharded (FSDP2) rather than copied (DDP)."""
    precision: PrecisionName = "bf16"
    recompute: bool = False
    reshard: bool = True
    """Whether gathered parameters are freed after the forward."""
    offload: bool = False
    """Whether parameters, gradients and optimizer state lie in host memory."""
    micro_batch: int = 1
    micro_steps: int = 1

    @property
    def strategy(self) -> str:
        """The strategy as settings name it."""
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
        axes = mesh_title(self.mesh)
        kept = "" if self.reshard or not self.sharded or self.mesh.size(Axis.DP_SHARD) == 1 else ", parameters kept"
        return f"{self.strategy} ({axes}{kept})" if axes else self.strategy
