"""Context parallel trains like one plain process: alone, and with every other axis around it.

Labels are padded unevenly, so that ranks of one sequence have different numbers of tokens in the loss. Tolerances with
AdamW over 8 steps, two in each phase, or 20: float32 differs from plain torch by the order of sums only (1e-5 on a loss of 3); bf16 keeps 8 bits
of every product and the reference is float32 (5e-2).
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasten import Accelerator, DeepSpeedPlugin, TorchContextParallelConfig
from hasten.config.sections.parallel import ParallelismConfig
from hasten.optional import available
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import BATCH, LOSS
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, seeded

STEPS = 20
FEW_OR_ALL = [8, pytest.param(STEPS, marks=pytest.mark.exhaustive)]
VOCAB = 16
LENGTH = 16
PHASES = ((1, False), (1, True), (3, False), (3, True))  # (accumulation, clipping)
WAYS = ("allgather", "ulysses")
ALLGATHER_OR_ALL = [
    pytest.param(
        comm_strategy,
        marks=() if comm_strategy == "allgather" else pytest.mark.exhaustive,
    )
    for comm_strategy in WAYS
]
CommStrategy = Literal["allgather", "ulysses"]
Batch = tuple[Tensor, Tensor, Tensor]


def model() -> TinyLM:
    return seeded(
        lambda: TinyLM(vocab=VOCAB, width=8, heads=4, depth=2, context=LENGTH)
    )


def batches(steps: int) -> list[Batch]:
    """Tokens, the labels one ahead with padding of different lengths, and positions."""
    g = torch.Generator().manual_seed(1)
    drawn_batches = []
    for _ in range(steps):
        tokens = torch.randint(0, VOCAB, (6, LENGTH + 1), generator=g)
        labels = tokens[:, 1:].clone()
        for row, length in enumerate(
            torch.randint(2, LENGTH + 1, (6,), generator=g).tolist()
        ):
            labels[row, length:] = -100
        drawn_batches.append(
            (tokens[:, :-1].clone(), labels, torch.arange(LENGTH).expand(6, -1).clone())
        )
    return drawn_batches


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def micro_batches(batch: Batch, readers: int, reader: int, every: int) -> list[Batch]:
    reader_chunks = [t.chunk(readers)[reader].chunk(every) for t in batch]
    return [
        (a.clone(), b.clone(), c.clone())
        for a, b, c in zip(*reader_chunks, strict=True)
    ]


def plain_losses(steps: int, readers: int) -> list[float]:
    net, losses = model(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
    for step, batch in enumerate(batches(steps)):
        every, clips = PHASES[step * len(PHASES) // steps]
        reader_batches = [
            micro
            for reader in range(readers)
            for micro in micro_batches(batch, readers, reader, every)
        ]
        optimizer.zero_grad()
        loss = torch.stack(
            [
                token_loss(net(tokens, positions), labels)
                for tokens, labels, positions in reader_batches
            ]
        ).mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if clips:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def hasten_losses(
    accelerator: Accelerator, steps: int, counts_tokens: bool
) -> list[float]:
    net = model()
    net, optimizer = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
    )
    mesh, losses = accelerator.ctx.mesh, []
    readers, reader = mesh.size(*BATCH), mesh.index(accelerator.process_index, *BATCH)
    for step, batch in enumerate(batches(steps)):
        every, clips = PHASES[step * len(PHASES) // steps]
        accelerator.gradient_accumulation_steps = every
        total = torch.zeros(())
        for tokens, labels, positions in micro_batches(batch, readers, reader, every):
            real = (labels != -100).sum()
            with (
                accelerator.accumulate(net),
                accelerator.context_parallel([tokens, labels, positions], [1, 1, 1]),
            ):
                loss = token_loss(net(tokens, positions), labels)
                num_local = (labels != -100).sum()
                accelerator.backward(
                    loss, **({"weight": num_local} if counts_tokens else {})
                )
                if clips:
                    accelerator.clip_grad_norm_(net.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            total += (loss.detach().nan_to_num() * num_local / real) / every
        losses.append(float(total))
    summed = torch.stack(
        accelerator.ctx.world.all_gather_object(torch.tensor(losses))
    ).sum(0)
    return (summed / (readers * accelerator.num_processes // mesh.size(*LOSS))).tolist()


def layouts(world: int) -> list[dict[str, Any]]:
    """Every way to lay context parallel and the other axes over the world."""
    if world == 2:
        return [{"cp_size": 2}, {"cp_size": 2, "strategy": "fsdp"}]
    return [
        {"cp_size": 4},
        {"cp_size": 2},
        {"cp_size": 2, "dp_shard_size": 2},
        {"cp_size": 2, "tp_size": 2},
        {"cp_size": 2, "dp_replicate_size": 2, "strategy": "fsdp"},
    ]


def made_for(
    sizes: dict[str, Any], comm_strategy: CommStrategy, precision: str
) -> Accelerator:
    sizes = dict(sizes)
    strategy = sizes.pop("strategy", None)
    handler = TorchContextParallelConfig(cp_comm_strategy=comm_strategy)
    config = ParallelismConfig(**sizes, cp_handler=handler)
    return Accelerator(
        mixed_precision=precision, strategy=strategy, parallelism_config=config
    )


@ranks(2)
@pytest.mark.parametrize("comm_strategy", ALLGATHER_OR_ALL)
@pytest.mark.parametrize("steps", FEW_OR_ALL)
def test_context_parallel_trains_like_plain_torch(
    ctx: ProcessContext, comm_strategy: CommStrategy, steps: int
) -> None:
    for sizes in layouts(2):
        for precision, number, tolerance in (("no", steps, 1e-5), ("bf16", 4, 5e-2)):
            accelerator = made_for(sizes, comm_strategy, precision)
            actual_losses = hasten_losses(accelerator, number, counts_tokens=False)
            assert actual_losses == pytest.approx(
                plain_losses(number, 1), abs=tolerance
            ), f"{sizes} {precision}"


@ranks(2, exhaustive=(4,))
@pytest.mark.parametrize(
    "stage",
    [3, *(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in (0, 1, 2))],
)
@pytest.mark.skipif(
    not available("deepspeed"),
    reason="deepspeed is not installed (pip install 'hasten[deepspeed]')",
)
def test_under_deepspeed_it_trains_like_plain_torch(
    ctx: ProcessContext, stage: int
) -> None:
    """`sp_size` is Ulysses by hasten's own attention; on four ranks two sequences are split over two ranks each."""
    engine = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": stage}})
    for sizes in (ParallelismConfig(sp_size=2), ParallelismConfig(cp_size=2)):
        accelerator = Accelerator(
            strategy="deepspeed", deepspeed_plugin=engine, parallelism_config=sizes
        )
        assert (accelerator.ctx.mesh.cp, accelerator.num_processes) == (
            2,
            ctx.world.size,
        )
        actual_losses = hasten_losses(accelerator, 8, counts_tokens=False)
        assert actual_losses == pytest.approx(
            plain_losses(8, ctx.world.size // 2), abs=1e-5
        ), sizes


@ranks(4)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case == 3 else pytest.mark.exhaustive)
        for case in range(5)
    ],
)
def test_with_other_axes_it_trains_like_plain_torch(
    ctx: ProcessContext, case: int
) -> None:
    sizes, comm_strategy = (
        layouts(4)[case],
        ("ulysses", "allgather", "allgather", "ulysses", "allgather")[case],
    )
    accelerator = made_for(sizes, comm_strategy, "no")  # type: ignore[arg-type]  # one of the literals
    steps = 8  # two in each phase: four processes take their time
    actual_losses = hasten_losses(accelerator, steps, counts_tokens=False)
    assert actual_losses == pytest.approx(
        plain_losses(steps, accelerator.ctx.mesh.size(*BATCH)), abs=1e-5
    )


@ranks(4)
@pytest.mark.exhaustive
@pytest.mark.parametrize("comm_strategy", WAYS)
@pytest.mark.parametrize("case", range(5))
def test_every_way_with_every_axis_trains_like_plain_torch(
    ctx: ProcessContext, case: int, comm_strategy: CommStrategy
) -> None:
    for precision, steps, tolerance in (("no", STEPS, 1e-5), ("bf16", 4, 5e-2)):
        accelerator = made_for(layouts(4)[case], comm_strategy, precision)
        actual_losses = hasten_losses(accelerator, steps, counts_tokens=False)
        expected = plain_losses(steps, accelerator.ctx.mesh.size(*BATCH))
        assert actual_losses == pytest.approx(expected, abs=tolerance), precision


@ranks(2)
def test_weights_of_losses_count_tokens_over_ranks_and_micro_steps(
    ctx: ProcessContext,
) -> None:
    """With weight=, one window is the mean over all its tokens, however they lie on ranks and in micro-steps."""
    grads = []
    for every in (1, 2):
        accelerator = made_for({"cp_size": 2}, "allgather", "no")
        net = accelerator.prepare(model())
        accelerator.gradient_accumulation_steps = every
        optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=1.0))
        for tokens, labels, positions in micro_batches(batches(1)[0], 1, 0, every):
            with (
                accelerator.accumulate(net),
                accelerator.context_parallel([tokens, labels, positions], [1, 1, 1]),
            ):
                accelerator.backward(
                    token_loss(net(tokens, positions), labels),
                    weight=(labels != -100).sum(),
                )
                accelerator.unscale_gradients(optimizer)
        grads.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    plain = model()
    tokens, labels, positions = batches(1)[0]
    token_loss(plain(tokens, positions), labels).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    expected = [p.grad for p in plain.parameters()]
    for window_grads in grads:
        for gradient, expected_gradient in zip(window_grads, expected, strict=True):
            torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-6)


class EncoderDecoder(nn.Module):
    """Attention both ways over a source, causal over a target, and from the target to the source."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, 8), nn.Embedding(32, 8)
        self.mix = nn.ModuleList(nn.Linear(8, 24, bias=False) for _ in range(3))
        self.out = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, VOCAB)

    def attend(
        self, index: int, x: Tensor, context: Tensor, causal: bool = False
    ) -> Tensor:
        projections = [
            self.mix[index](t).view(*t.shape[:2], 3, 4, 2).transpose(1, 3)
            for t in (x, context, context)
        ]
        q, k, v = (t[:, :, number] for number, t in enumerate(projections))
        mixed = (
            F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            .transpose(1, 2)
            .flatten(2)
        )
        out: Tensor = self.out[index](mixed)
        return x + out

    def forward(
        self,
        source: Tensor,
        source_positions: Tensor,
        target: Tensor,
        target_positions: Tensor,
    ) -> Tensor:
        memory, x = (
            self.embed(source) + self.place(source_positions),
            self.embed(target) + self.place(target_positions),
        )
        memory = self.attend(0, memory, memory)
        x = self.attend(2, self.attend(1, x, x, causal=True), memory)
        out: Tensor = self.head(x)
        return out


@ranks(2)
@pytest.mark.parametrize("comm_strategy", WAYS)
@pytest.mark.parametrize("steps", FEW_OR_ALL)
def test_an_encoder_and_a_decoder_of_other_lengths_train_like_plain_torch(
    ctx: ProcessContext, comm_strategy: CommStrategy, steps: int
) -> None:
    def run(accelerator: Accelerator | None) -> list[float]:
        net: nn.Module = seeded(EncoderDecoder)
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
        if accelerator is not None:
            net, optimizer = accelerator.prepare(net, optimizer)
        g, losses = torch.Generator().manual_seed(2), []
        for _ in range(steps):
            source, target = (
                torch.randint(0, VOCAB, (3, n), generator=g) for n in (24, 8)
            )
            tensors = [
                source,
                torch.arange(24).repeat(3, 1),
                target,
                torch.arange(8).repeat(3, 1),
                target.roll(-1, 1),
            ]
            optimizer.zero_grad()
            if accelerator is None:
                loss = token_loss(net(*tensors[:4]), tensors[4])
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            else:
                with accelerator.context_parallel(tensors, [1] * 5):
                    loss = token_loss(net(*tensors[:4]), tensors[4])
                    accelerator.backward(loss)
                loss = accelerator.reduce(loss.detach(), "mean")
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    assert run(made_for({"cp_size": 2}, comm_strategy, "no")) == pytest.approx(
        run(None), abs=1e-5
    )
