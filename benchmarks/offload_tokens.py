"""Token by token: generation with streamed weights beside Accelerate, and beside the resident model bit for bit.

    python benchmarks/offload_tokens.py                 # an accelerator, about two minutes
    python benchmarks/offload_tokens.py --quick         # fewer layers
    python benchmarks/offload_tokens.py --device cpu    # tiny, to see that it runs

Besides the logits of every step, each linear layer's weight is compared, while it is used, with the resident one: wrong
weights are an error of the streaming, equal weights with other results an effect of where in memory they lie. Where
something differs, the same weights, resident but laid out in one buffer at several alignments, tell the two apart.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from offload import GB, Aim, Bench, arguments, free, measure, num_bytes, on_host, original_accelerate, write
from torch import Tensor, nn

from hasten.bigmodel.dispatch import cpu_offload
from hasten.bigmodel.meta import init_empty_weights
from hasten.bigmodel.placed import detach, streamers_of

AIMS = (Aim("generation token by token, times Accelerate", "generation", "times_faster", at_least=4),)


def settings(device: torch.device, layers: int) -> Any:
    from transformers import LlamaConfig

    tiny = device.type == "cpu"
    return LlamaConfig(
        vocab_size=128 if tiny else 32000,
        hidden_size=32 if tiny else 4096,
        intermediate_size=128 if tiny else 11008,
        num_hidden_layers=layers,
        num_attention_heads=4 if tiny else 32,
        max_position_embeddings=256,
    )


def ask(model: Any, ids: Tensor, tokens: int) -> tuple[Tensor, list[Tensor]]:
    """Tokens and the logits of every step."""
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return found.sequences, list(found.logits)


def watched(
    model: Any, ids: Tensor, tokens: int, weights: dict[str, Tensor]
) -> tuple[list[tuple[str, Tensor]], dict[str, list[Tensor]]]:
    """The outputs of linear layers, call by call, and whether their weights were those given, without waiting."""
    outputs: list[tuple[str, Tensor]] = []
    wrong: dict[str, list[Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(module: Any, args: Any, output: Tensor) -> None:
            outputs.append((name, output.detach().clone()))
            wanted = weights[f"{name}.weight"]
            if (
                module.weight.device == wanted.device
            ):  # a layer that is a block by itself has its weight back at rest here
                wrong.setdefault(name, []).append((module.weight != wanted).any())

        return keep

    handles = [
        part.register_forward_hook(hook(name)) for name, part in model.named_modules() if isinstance(part, nn.Linear)
    ]
    ask(model, ids, tokens)
    for handle in handles:
        handle.remove()
    return outputs, wrong


def first_difference(wanted: list[tuple[str, Tensor]], found: list[tuple[str, Tensor]]) -> str:
    calls: dict[str, int] = {}
    for (name, a), (_, b) in zip(wanted, found, strict=True):
        calls[name] = calls.get(name, 0) + 1
        if not torch.equal(a, b.to(a.device)):
            return f"{name}, call {calls[name]}, input rows {a.shape[1]}, by {float((a.float() - b.to(a.device).float()).abs().max()):.3g}"
    return "none"


def repacked(model: nn.Module, alignment: int) -> None:
    """Lay the weights of a resident model out in one buffer."""
    sizes = [-(-p.numel() * p.element_size() // alignment) * alignment for p in model.parameters()]
    start = next(model.parameters())
    buffer = torch.empty(sum(sizes) + 2 * max(alignment, 2**21), dtype=torch.uint8, device=start.device)
    at = -buffer.data_ptr() % max(alignment, 2**21) + (alignment if alignment < 2**21 else 0)
    for parameter, size in zip(model.parameters(), sizes, strict=True):
        room = buffer[at : at + parameter.numel() * parameter.element_size()].view(parameter.dtype)
        room.copy_(parameter.data.reshape(-1))
        parameter.data = room.view(parameter.shape)
        at += size


def timing(bench: Bench) -> None:
    """Seconds a token beside Accelerate, and the logits of every step beside the resident model's."""
    config = settings(bench.device, bench.layers)
    source, empty = built(bench, config)
    ours, peer = (on_host(bench, source, empty) for _ in range(2))
    ids = torch.randint(3, 100, (1, 8), device=bench.device)
    count = 4 if bench.tiny or bench.quick else 6
    wanted, logits = ask(source, ids, count)
    again, same = ask(source, ids, count)
    resident_s = bench.turns({"resident": lambda: ask(source, ids, count)}, rounds=2)["resident"]
    weights = num_bytes(source)
    source = nn.Module()  # gives its weights back
    free(bench)
    limit = weights / bench.bandwidth
    cpu_offload(ours, bench.device)
    original_accelerate().cpu_offload(peer, bench.device)
    answers: dict[str, tuple[Tensor, list[Tensor]]] = {}

    def answer(name: str, model: Any) -> None:
        answers[name] = ask(model, ids, count)

    times = bench.turns(
        {"hasten": lambda: answer("hasten", ours), "Accelerate": lambda: answer("Accelerate", peer)}, rounds=2
    )
    (found, steps), (theirs, _) = answers["hasten"], answers["Accelerate"]
    bench.add(
        part="generation",
        what=f"Llama-like, {weights / GB:.1f} GB, {count} tokens",
        hasten_s_a_token=times["hasten"] / count,
        Accelerate_s_a_token=times["Accelerate"] / count,
        resident_s_a_token=resident_s / count,
        of_limit=round(times["hasten"] / count / limit, 3),
        times_faster=round(times["Accelerate"] / times["hasten"], 2),
        bit_equal=alike(wanted, found) and all(map(alike, logits, steps)),
        resident_twice_equal=alike(wanted, again) and all(map(alike, logits, same)),
        Accelerate_tokens_equal=alike(wanted, theirs),
    )
    detach(ours)


def half_resident(bench: Bench) -> None:
    """Seconds a token with half of the weights on the device."""
    config = settings(bench.device, bench.layers)
    source, empty = built(bench, config)
    ours: Any = on_host(bench, source, empty)
    ids = torch.randint(3, 100, (1, 8), device=bench.device)
    count = 4 if bench.tiny or bench.quick else 6
    wanted, logits = ask(source, ids, count)
    weights = num_bytes(source)
    del source
    free(bench)
    cpu_offload(ours, bench.device, resident=weights // 2)
    found, steps = ask(ours, ids, count)
    half = bench.turns({"hasten": lambda: ask(ours, ids, count)}, rounds=2)["hasten"]
    bench.add(
        part="generation, half resident",
        what="half of the weights stay on the device",
        hasten_s_a_token=half / count,
        of_limit=round(half / count / (weights / bench.bandwidth), 3),
        bit_equal=alike(wanted, found) and all(map(alike, logits, steps)),
    )
    detach(ours)


def alike(wanted: Tensor, found: Tensor) -> bool:
    return bool(torch.equal(wanted, found.to(wanted.device)))


def built(bench: Bench, config: Any) -> tuple[Any, Callable[[], nn.Module]]:
    """A model on the device, and a way to make it again without weights."""
    from transformers import LlamaForCausalLM

    def empty() -> nn.Module:
        with torch.device("cpu"), init_empty_weights():
            return LlamaForCausalLM(config).to(torch.bfloat16)

    torch.manual_seed(0)
    with bench.device:
        return LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False), empty


class Comparison:
    """A resident model's tokens, logits and outputs, with which other models are compared step by step."""

    def __init__(self, bench: Bench, source: Any, tokens: int) -> None:
        self.bench, self.tokens = bench, tokens
        self.ids = torch.randint(3, 100, (1, 8), device=bench.device)
        self.wanted, self.logits = ask(source, self.ids, tokens)
        self.weights = {name: tensor.detach() for name, tensor in source.state_dict().items()}
        self.outputs, _ = watched(source, self.ids, tokens, self.weights)

    def add(self, what: str, model: Any) -> bool:
        """Whether a model is equal in every step; its row says what differs first."""
        found, steps = ask(model, self.ids, self.tokens)
        unequal = [n for n, (a, b) in enumerate(zip(self.logits, steps, strict=True)) if not alike(a, b)]
        seen, wrong = watched(model, self.ids, self.tokens, self.weights)
        bad = [
            f"{name}: calls {[n for n, one in enumerate(flags) if bool(one)]}"
            for name, flags in wrong.items()
            if any(map(bool, flags))
        ]
        equal = alike(self.wanted, found) and not unequal
        self.bench.add(
            part="step by step",
            what=what,
            bit_equal=equal,
            first_step_with_other_logits=unequal[:1],
            first_output=first_difference(self.outputs, seen),
            wrong_weights=bad[:4],
        )
        return equal


def step_by_step(bench: Bench) -> None:
    """Every step and every linear layer, streamed and half resident; where they differ, what it depends on."""
    config = settings(bench.device, 2 if bench.tiny else 5)
    source, empty = built(bench, config)
    compared = Comparison(bench, source, 4 if bench.tiny else 12)
    ours: Any = on_host(bench, source, empty)
    cpu_offload(ours, bench.device)
    equal = compared.add("streamed", ours)
    ours(compared.ids.repeat(1, 3))
    equal &= compared.add("streamed, after a longer forward", ours)
    if not equal or bench.tiny:
        (streamer,) = streamers_of(ours)
        release = streamer.release

        def patient(index: int) -> None:
            bench.sync()
            release(index)

        streamer.release = patient  # type: ignore[method-assign]
        for unit in streamer.units:
            unit.module.forward._release = patient
        compared.add("streamed, waiting after every block", ours)
    detach(ours)
    cpu_offload(ours, bench.device, resident=num_bytes(ours) // 2)
    equal &= compared.add("half resident", ours)
    detach(ours)
    if equal and not bench.tiny:
        return
    compared.add("resident again", source)
    for alignment in (512, 4096, 2**21):
        other: Any = empty()
        other.load_state_dict({name: tensor.clone() for name, tensor in compared.weights.items()}, assign=True)
        for name, buffer in source.named_buffers():
            owner, _, last = name.rpartition(".")
            other.get_submodule(owner)._buffers[last] = buffer
        repacked(other.eval(), alignment)
        compared.add(f"resident, in one buffer, {alignment} bytes aligned", other)
        del other


def main() -> None:
    parts = {"timing": timing, "half": half_resident, "steps": step_by_step}
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="*", default=list(parts), choices=list(parts))
    parser.add_argument("--layers", type=int, help="layers of the model (16 of 0.40 GB)")
    chosen = parser.parse_args()
    device = torch.device(chosen.device, 0) if chosen.device != "cpu" else torch.device("cpu")
    bench, started = Bench(device, chosen.quick), time.perf_counter()
    bench.layers = chosen.layers or bench.layers
    try:
        failed = measure(bench, {name: parts[name] for name in chosen.parts})
    finally:
        write(
            bench,
            "offload_tokens",
            chosen.out,
            time.perf_counter() - started,
            "Generation with offloaded weights",
            AIMS,
        )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
