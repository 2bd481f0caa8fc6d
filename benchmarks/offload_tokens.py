"""Token by token, bit for bit: generation with streamed weights beside the resident model, and what differs first.

    python benchmarks/offload_tokens.py                 # an accelerator, about a minute
    python benchmarks/offload_tokens.py --device cpu    # tiny, to see that it runs

Besides the logits of every step, each linear layer's weight is compared, while it is used, with the resident one: wrong
weights are an error of the streaming, equal weights with other results an effect of where in memory they lie. The same
weights, resident but laid out in one buffer at several alignments, tell the two apart.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from loading import RESULTS, versions
from offload import on_host
from torch import Tensor, nn

from hasten.bigmodel.dispatch import cpu_offload
from hasten.bigmodel.meta import init_empty_weights
from hasten.bigmodel.placed import detach, streamers_of


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
            wrong.setdefault(name, []).append((module.weight != weights[f"{name}.weight"]).any())

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


def main() -> None:
    from transformers import LlamaForCausalLM

    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    device = torch.device(chosen.device, 0) if chosen.device != "cpu" else torch.device("cpu")
    config, rows, started = settings(device, chosen.layers), [], time.perf_counter()

    def add(**row: Any) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    torch.manual_seed(0)
    with torch.no_grad():
        with device:
            source: Any = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        ids = torch.randint(3, 100, (1, 8), device=device)
        tokens, logits = ask(source, ids, chosen.tokens)
        weights = {name: tensor.detach() for name, tensor in source.state_dict().items()}
        outputs, _ = watched(source, ids, chosen.tokens, weights)

        def compare(what: str, model: Any) -> None:
            found, steps = ask(model, ids, chosen.tokens)
            unequal = [
                n for n, (a, b) in enumerate(zip(logits, steps, strict=True)) if not torch.equal(a, b.to(a.device))
            ]
            seen, wrong = watched(model, ids, chosen.tokens, weights)
            bad = [
                f"{name}: calls {[n for n, one in enumerate(flags) if bool(one)]}"
                for name, flags in wrong.items()
                if any(map(bool, flags))
            ]
            add(
                what=what,
                tokens_equal=bool(torch.equal(found.to(tokens.device), tokens)),
                first_step_with_other_logits=unequal[:1],
                first_output=first_difference(outputs, seen),
                wrong_weights=bad[:4],
            )

        def empty() -> nn.Module:
            with torch.device("cpu"), init_empty_weights():
                return LlamaForCausalLM(config).to(torch.bfloat16)

        compare("resident again", source)
        for alignment in (512, 4096, 2**21):
            other: Any = empty()
            other.load_state_dict({n: t.clone() for n, t in weights.items()}, assign=True)
            for name, buffer in source.named_buffers():
                owner, _, last = name.rpartition(".")
                other.get_submodule(owner)._buffers[last] = buffer
            repacked(other.eval(), alignment)
            compare(f"resident, in one buffer, {alignment} bytes aligned", other)
            del other
        ours: Any = on_host(None, source, empty)  # type: ignore[arg-type]
        half = sum(p.numel() * p.element_size() for p in ours.parameters()) // 2
        cpu_offload(ours, device)
        compare("streamed", ours)
        ours(ids.repeat(1, 3))
        compare("streamed, after a longer forward", ours)
        (streamer,) = streamers_of(ours)
        release = streamer.release

        def patient(index: int) -> None:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            release(index)

        streamer.release = patient  # type: ignore[method-assign]
        for unit in streamer.units:
            unit.module.forward._release = patient
        compare("streamed, waiting after every block", ours)
        detach(ours)
        cpu_offload(ours, device, resident=half)
        compare("half resident", ours)
        detach(ours)
        gc.collect()
    out = chosen.out or RESULTS / f"offload_tokens_{device.type}"
    known = {**versions(device.type), "seconds": str(round(time.perf_counter() - started))}
    out.with_suffix(".json").write_text(json.dumps({"versions": known, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
