"""A model divided over two processes by prepare_pippy; checks itself, and prints "fine". Started by test_pippy.py."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from accelerate import PartialState, prepare_pippy


def make():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_embd=8, n_layer=4, n_head=2, vocab_size=32, n_positions=16)
    ).eval()


state = PartialState(cpu=True)
reference_model = make()
ids = torch.arange(24).reshape(4, 6)
for gather_output, points in ((False, "auto"), (True, ["transformer.h.3"])):
    model = prepare_pippy(
        make(),
        points,
        no_split_module_classes=["GPT2Block"],
        example_args=(ids,),
        gather_output=gather_output,
    )
    if points != "auto":
        assert model.hf_split_points == points
    assert sum(p.numel() for p in model.parameters()) < sum(
        p.numel() for p in reference_model.parameters()
    )
    for rows in (4, 3):
        with torch.no_grad():
            output, expected = model(ids[:rows]), reference_model(ids[:rows])
        if gather_output or state.is_last_process:
            torch.testing.assert_close(
                output.logits, expected.logits, rtol=0, atol=1e-5
            )
        else:
            assert output is None, output
with pytest.raises(ValueError, match="Name the class of the blocks"):
    prepare_pippy(make(), no_split_module_classes=["GPT2Model"])
print("fine")
