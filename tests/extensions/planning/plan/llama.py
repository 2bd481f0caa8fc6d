"""A trace of a Llama-like model, written by hand: what the pure parts of the planner are tested on."""

from __future__ import annotations

from hasten.extensions.planning.plan.traced import (
    LinearCost,
    ModelTrace,
    Moment,
    OptimizerFacts,
    ParameterKind,
    PrecisionName,
    Variant,
)


def llama(layers: int = 80, width: int = 8192, sequence: int = 4096) -> ModelTrace:
    """A decoder with grouped keys, `layers` deep and `width` wide; 70 billion parameters as it is."""
    inner, keys, words = width * 7 // 2, width // 8, 128_256

    def block(*shape: int, number: int, split: int | None = None) -> ParameterKind:
        return ParameterKind(
            shape=shape, count=number * layers, in_block=True, split=split
        )

    parameters = (
        block(width, width, number=1, split=0),
        block(width, width, number=1, split=1),
        block(keys, width, number=2, split=0),
        block(inner, width, number=2, split=0),
        block(width, inner, number=1, split=1),
        block(width, number=2),
        ParameterKind(shape=(words, width), count=2),
        ParameterKind(shape=(width,)),
    )
    largest = 2 * width * width + 2 * keys * width + 3 * inner * width + 2 * width
    return ModelTrace(
        name="llama",
        parameters=parameters,
        optimizer=OptimizerFacts(),
        variants=tuple(
            _variant(precision, recompute, layers, width, sequence)
            for precision in ("bf16", "no")
            for recompute in (False, True)
        ),
        num_blocks=layers,
        block_classes=("LlamaDecoderLayer",),
        largest_block=largest,
        split_share=0.7,
        tp_sizes=(2, 4, 8),
        tp_summed=6 * layers * width,
        sequence=sequence,
    )


def _variant(
    precision: PrecisionName, recompute: bool, layers: int, width: int, sequence: int
) -> Variant:
    item = 4 if precision == "no" else 2
    tokens = sequence * width * item
    kept_bytes = tokens * (layers + 20 if recompute else 17 * layers)
    flops = 6 * 12 * width * width * layers * sequence * (4 / 3 if recompute else 1)
    return Variant(
        precision=precision,
        recompute=recompute,
        flops={"fp32" if precision == "no" else precision: LinearCost(0, flops)},
        moved=LinearCost(0, tokens * 100 * layers),
        operations=60 * layers,
        moments=(
            Moment(activations=LinearCost(0, kept_bytes)),
            Moment(activations=LinearCost(0, kept_bytes / 2), gradients=0.5),
        ),
    )
