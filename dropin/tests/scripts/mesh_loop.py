"""Tensor parallelism as scripts for Accelerate ask for it: a Llama with its own plan, against plain torch in the same process."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig


def make():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes))


def losses(model, optimizer, backward):
    step_losses = []
    for step in range(4):
        tokens = (torch.arange(24).view(4, 6) * (step + 1)) % 32
        loss = model(input_ids=tokens, labels=tokens).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step_losses.append(float(loss.detach()))
    return step_losses


plain = make()
expected = losses(
    plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), lambda loss: loss.backward()
)

config = ParallelismConfig(tp_size=2)
accelerator = Accelerator(cpu=True, parallelism_config=config)
mesh = config.build_device_mesh("cpu")
assert mesh.mesh_dim_names == ("tp",), mesh
assert mesh["tp"].size() == 2, mesh
model = make()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
assert model.model.layers[0].mlp.up_proj.weight.to_local().shape == (16, 16), (
    "split by the plan the model carries"
)
actual_losses = losses(model, optimizer, accelerator.backward)
assert torch.allclose(
    torch.tensor(actual_losses), torch.tensor(expected), rtol=0, atol=1e-5
), (
    actual_losses,
    expected,
)
print("trained like plain torch")
