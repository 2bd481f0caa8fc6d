"""Generation during training: sample texts from a sharded or replicated model, on all processes, in input order.

hasten launch --cpu --num_processes 2 examples/generate.py
"""

from __future__ import annotations

import argparse

import torch
from char_lm import Sources, read_sources
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from hasten import Accelerator, set_seed

PROMPTS = ("def ", "import ", "return ", "class ", "    if ")


def main() -> None:
    """Train a character model, and continue the prompts every few steps."""
    parser = argparse.ArgumentParser(description="Generate texts while training.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--megabytes", type=float, default=0.5)
    args = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator()

    rows = DataLoader(
        Sources(read_sources(args.megabytes), 64), batch_size=16, shuffle=True
    )
    prompts = DataLoader(
        [{"input_ids": torch.tensor(list(text.encode()))} for text in PROMPTS],
        batch_size=1,
    )
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=128, pad_token_id=0, eos_token_id=None, **sizes)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, rows, prompts = accelerator.prepare(
        model, optimizer, rows, prompts
    )

    step = 0
    while step < args.steps:
        for batch in rows:
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % args.every == 0 or step == args.steps:
                accelerator.print(
                    f"step {step}: loss {accelerator.reduce(loss.detach(), 'mean').item():.3f}"
                )
                for text in continue_prompts(accelerator, model, prompts, args.length):
                    accelerator.print(f"  {text!r}")
            if step == args.steps:
                break
    accelerator.end_training()


def continue_prompts(
    accelerator: Accelerator,
    model: torch.nn.Module,
    prompts: DataLoader[dict[str, torch.Tensor]],
    length: int,
) -> list[str]:
    """Return each prompt with its continuation; every process gets all of them."""
    model.eval()
    texts = []
    for batch in prompts:
        for row in accelerator.generate(
            model, batch, max_new_tokens=length, do_sample=False
        ):
            texts.append(bytes(code for code in row.tolist() if code).decode())
    model.train()
    return texts


if __name__ == "__main__":
    main()
