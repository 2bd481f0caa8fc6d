"""Sequence parallelism as scripts for Accelerate write it, against plain torch in the same process. Usage: sequence_loop.py STAGE

STAGE is a ZeRO stage, or "none" for a run without DeepSpeed. The scripts' loop gathers losses and token counts of the group.
"""

import os
import sys

import torch
import torch.distributed.nn.functional
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    gather_object,
)

SP, LENGTH, ROWS = 2, 16, 2


def rows(count):
    """Prompts without labels, and padding on the right, of different lengths."""
    g = torch.Generator().manual_seed(1)
    samples = []
    for number in range(count):
        tokens = torch.randint(0, 64, (LENGTH,), generator=g)
        labels, mask = tokens.clone(), torch.ones(LENGTH, dtype=torch.long)
        labels[: number % 9] = -100
        labels[LENGTH - number % 5 :] = -100
        mask[LENGTH - number % 5 :] = 0
        samples.append({"input_ids": tokens, "labels": labels, "attention_mask": mask})
    return samples


def make(**settings):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes, **settings)
    )


class Gathered(torch.autograd.Function):
    """What the documented all_gather does; torch's own has no backward for a part of the world under gloo."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        gathered = [torch.empty_like(tensor) for _ in range(SP)]
        torch.distributed.all_gather(gathered, tensor, group=group)
        return tuple(gathered)

    @staticmethod
    def backward(ctx, *grads):
        summed = torch.stack(grads)
        torch.distributed.all_reduce(summed, group=ctx.group)
        return summed[torch.distributed.get_rank(ctx.group)], None


def all_gather(tensor, group):
    if torch.distributed.get_world_size() == SP:
        return torch.distributed.nn.functional.all_gather(tensor, group=group)
    return Gathered.apply(tensor, group)


def optimizer_of(model):
    # notices the scale of gradients
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def plain(data, readers, every):
    """One process: in each micro-step the mean over `readers` batches, each the mean over its tokens."""
    model, losses = make(), []
    optimizer = optimizer_of(model)
    batches = list(DataLoader(data, batch_size=ROWS))
    world = SP * readers  # batches of a round; the processes of a sequence take turns
    rounds = [batches[first : first + world] for first in range(0, len(batches), world)]
    micro = [group[turn::SP] for group in rounds for turn in range(SP)]
    for number, micro_batches in enumerate(micro):
        loss = torch.stack([model(**batch).loss for batch in micro_batches]).mean()
        (loss / every).backward()
        if (number + 1) % every == 0 or number + 1 == len(micro):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model


def split(accelerator, data, recompute):
    model = make()
    if recompute:
        model.gradient_checkpointing_enable()
    model.train()
    model, optimizer, loader = accelerator.prepare(
        model, optimizer_of(model), DataLoader(data, batch_size=ROWS)
    )
    readers = accelerator.num_processes // SP
    assert len(loader) == len(data) // ROWS // readers, len(loader)
    group, step_losses = accelerator.torch_device_mesh["sp"].get_group(), []
    for batch in loader:
        with accelerator.accumulate(model):
            shift_labels = batch["shift_labels"]
            assert shift_labels.shape == (ROWS, LENGTH // SP), shift_labels.shape
            loss = model(**batch, use_cache=False).loss
            losses = all_gather(loss, group)
            good = (shift_labels != -100).view(-1).sum()
            goods = all_gather(good, group)
            total = sum(
                losses[rank] * goods[rank] for rank in range(SP) if goods[rank] > 0
            )
            loss = total / max(sum(goods), 1)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        step_losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return step_losses, model, loader


def check_reading(accelerator, model, reference, loader):
    """Evaluation of whole sequences, of parts, and the position of a loader."""
    reference.load_state_dict(accelerator.get_state_dict(model))
    full_loader = accelerator.prepare(DataLoader(rows(7), batch_size=ROWS))
    model.eval()
    reference.eval()
    gathered_ids = []
    with torch.no_grad():
        for batch in full_loader:
            actual_logits, expected = model(**batch).logits, reference(**batch).logits
            assert torch.allclose(actual_logits, expected, atol=1e-5), (
                (actual_logits - expected).abs().max()
            )
            gathered_ids += [accelerator.gather_for_metrics(batch["input_ids"])]
        assert torch.equal(
            torch.cat(gathered_ids), torch.stack([row["input_ids"] for row in rows(7)])
        ), "each sample once"
        for batch in loader:
            labels = {"labels": None, "shift_labels": None}
            gathered_outputs = gather_object(
                [(batch["input_ids"], model(**{**batch, **labels}).logits)]
            )
            sequence_parts = gathered_outputs[accelerator.process_index // SP * SP :][
                :SP
            ]
            tokens, logits = (
                torch.cat([rank_outputs[index] for rank_outputs in sequence_parts], 1)
                for index in (0, 1)
            )
            expected = reference(input_ids=tokens).logits
            assert torch.allclose(logits, expected, atol=1e-5), (
                (logits - expected).abs().max()
            )
    read = [batch["input_ids"] for batch in loader]
    for skipped in (1, 2, 3):
        left = [
            batch["input_ids"]
            for batch in accelerator.skip_first_batches(loader, skipped)
        ]
        assert [read_batch.tolist() for read_batch in left] == [
            read_batch.tolist() for read_batch in read[skipped:]
        ], skipped
    model.train()
    error_message = ""
    try:
        model(input_ids=rows(1)[0]["input_ids"][None])
    except Exception as error:
        error_message = str(error)
    assert "Pass the loader and the model to the same prepare()" in error_message, (
        "whole sequences in training would be joined"
    )


def main(stage):
    engine = {"zero_optimization": {"stage": int(stage)}} if stage != "none" else None
    config = ParallelismConfig(
        sp_backend="deepspeed",
        sp_size=SP,
        sp_handler=DeepSpeedSequenceParallelConfig(
            sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
        ),
        dp_replicate_size=int(os.environ["WORLD_SIZE"]) // SP,
    )
    for every, recompute, count in ((1, False, 32), (3, True, 16)):
        plugin = (
            DeepSpeedPlugin(
                hf_ds_config=dict(engine, gradient_accumulation_steps=every)
            )
            if engine
            else None
        )
        accelerator = Accelerator(
            cpu=True,
            deepspeed_plugin=plugin,
            parallelism_config=config,
            gradient_accumulation_steps=every,
        )
        data = rows(count * accelerator.num_processes // SP)
        actual_losses, model, loader = split(accelerator, data, recompute)
        expected, reference = plain(data, accelerator.num_processes // SP, every)
        assert len(actual_losses) == count // ROWS
        assert torch.allclose(
            torch.tensor(actual_losses), torch.tensor(expected), rtol=0, atol=1e-5
        ), (actual_losses, expected)
        if every == 1:
            check_reading(accelerator, model, reference, loader)
            assert (
                "sdpa_over"
                not in accelerator.unwrap_model(model).config.to_json_string()
            ), "it would be saved"
        accelerator.state._reset_state(False)
    print("trained like plain torch")


main(sys.argv[1])
