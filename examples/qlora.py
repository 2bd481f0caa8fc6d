"""QLoRA: base weights in four bits, sharded over the processes, and LoRA adapters trained on top (peft, bitsandbytes).

hasten launch --cpu --num_processes 2 examples/qlora.py
"""

from __future__ import annotations

import argparse

import torch
from char_lm import Sources, read_sources
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hasten import Accelerator, dequantize_weights, quantize_weights, set_seed


def main() -> None:
    """Train the adapter, save it in peft's format, and write a merged model."""
    parser = argparse.ArgumentParser(
        description="Train a LoRA adapter on a model in four bits."
    )
    parser.add_argument(
        "--model",
        help="a causal language model of the Hub; by default a small random one for characters",
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--megabytes", type=float, default=0.5)
    parser.add_argument("--out", default="runs/qlora")
    args = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(strategy="fsdp")

    adapter = LoraConfig(
        r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]
    )
    model = get_peft_model(load_base_model(args.model), adapter)
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW(
        (p for p in model.parameters() if p.requires_grad), lr=2e-3
    )
    loader = DataLoader(
        Sources(read_sources(args.megabytes), 64),
        batch_size=8,
        shuffle=True,
        drop_last=True,
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for step, batch in zip(range(args.steps), loader, strict=False):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == args.steps - 1:
            accelerator.print(
                f"step {step}: loss {accelerator.reduce(loss.detach(), 'mean').item():.3f}"
            )

    # on every process: the shards are gathered
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(
            f"{args.out}/adapter", state_dict=weights
        )
        merged = PeftModel.from_pretrained(
            dequantize_weights(load_base_model(args.model)), f"{args.out}/adapter"
        ).merge_and_unload()
        merged.save_pretrained(f"{args.out}/merged")
        print(f"adapter and merged model are in {args.out}")
    accelerator.end_training()


def load_base_model(name: str | None) -> nn.Module:
    """Return the frozen base model with its linear layers in four bits."""
    if name is not None:
        model = AutoModelForCausalLM.from_pretrained(name)
    else:
        torch.manual_seed(0)
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes))
    return quantize_weights(model.requires_grad_(False), "nf4")


if __name__ == "__main__":
    main()
