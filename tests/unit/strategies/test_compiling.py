"""Compiling beside the blocks: the loss, embeddings and norms of a transformers model, blocks that recompute until they are compiled, the wait."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hasten import Accelerator
from hasten.errors import ConfigError
from hasten.modules import forwarding
from hasten.strategies import compiling
from hasten.strategies.compile_ahead import UntilCompiled, recompute_until_compiled
from hasten.strategies.compiling import CompiledLoss, all_uncompiled, compile_modules, compile_rest, is_compiled
from hasten.testing.toys import seeded

EAGER = {"backend": "eager"}  # traced, and run as it was: no code is generated
TOKENS = torch.arange(12).view(2, 6)


def llama() -> Any:  # Any: a model of transformers
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
        use_cache=False,
    )
    return seeded(lambda: LlamaForCausalLM(config).train())  # type: ignore[no-untyped-call]  # transformers leaves it untyped


def gradients(model: Any) -> tuple[Tensor, list[Tensor]]:
    loss: Tensor = model(input_ids=TOKENS, labels=TOKENS).loss
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.fixture(scope="module")
def expected() -> tuple[Tensor, list[Tensor]]:
    return gradients(llama())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.13, while it traces
def test_the_loss_the_embedding_and_the_norm_are_compiled_and_train_alike(
    expected: tuple[Tensor, list[Tensor]],
) -> None:
    model = llama()
    done = compile_rest(model, EAGER)
    assert done == ["model.embed_tokens", "model.norm", "the loss of LlamaForCausalLM"]
    assert isinstance(model.loss_function, CompiledLoss)
    assert compile_rest(model, EAGER) == [], "twice is once"
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=1e-7)
    with torch.no_grad():  # the function itself
        torch.testing.assert_close(model(input_ids=TOKENS, labels=TOKENS).loss, expected[0], rtol=0, atol=1e-7)
    all_uncompiled(model)
    assert not any(is_compiled(part) for part in model.modules())
    assert not isinstance(model.loss_function, CompiledLoss)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_hold_the_loss_function_itself(copied: Callable[[Any], Any]) -> None:
    model = llama()
    plain = model.loss_function
    compile_rest(model, EAGER)
    assert copied(model).loss_function is plain


def test_blocks_recompute_until_they_are_compiled_bit_for_bit(expected: tuple[Tensor, list[Tensor]]) -> None:
    model = llama()
    blocks = list(model.model.layers)
    recompute_until_compiled(blocks)
    assert all(forwarding.find(block, UntilCompiled.tag) for block in blocks)
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=0)


def test_blocks_that_count_something_in_buffers_are_not_run_twice() -> None:
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2)]
    recompute_until_compiled(blocks)
    assert not any(forwarding.find(block, UntilCompiled.tag) for block in blocks)


def test_the_loss_is_compiled_with_blocks_only() -> None:
    with pytest.raises(ConfigError, match="the whole model is one graph with its loss; set use_regional_compilation"):
        Accelerator(cpu=True, dynamo_plugin={"backend": "eager", "compile_loss": True})
    with pytest.raises(ConfigError, match="nothing is compiled"):
        Accelerator(cpu=True, dynamo_plugin={"compile_loss": True})


@pytest.mark.parametrize(("number", "is_main"), [(3, True), (1, True), (3, False)])
def test_the_first_calls_of_compiled_blocks_are_shown_and_logged_once(
    number: int, is_main: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[str] = []

    @contextmanager
    def shown(text: Callable[[float], str]) -> Iterator[None]:
        lines.append(text(12.4))
        yield

    monkeypatch.setattr(compiling, "waiting_line", shown)
    blocks = [nn.Linear(2, 2) for _ in range(number)]
    plain = [block(torch.ones(2)) for block in blocks]
    with caplog.at_level(logging.INFO, logger="hasten"):
        compile_modules(blocks, "Net", EAGER, is_main)
        for _ in range(2):
            assert all(torch.equal(block(torch.ones(2)), out) for block, out in zip(blocks, plain, strict=True))
    wanted = {
        (3, True): [f"compiling Net, block {one} of 3, 12 s" for one in (1, 2, 3)],
        (1, True): ["compiling Net, 12 s"],
        (3, False): [],
    }
    assert [line.replace(", 13 s", ", 12 s") for line in lines] == wanted[number, is_main]
    told = [record.getMessage() for record in caplog.records if "compiled" in record.getMessage()]
    what = "Net" if number == 1 else "the 3 blocks of Net"
    assert [line.rpartition(" in ")[0] for line in told] == ([f"compiled {what}"] if is_main else [])
    assert not any(isinstance(block._compiled_call_impl, compiling._FirstCall) for block in blocks), (
        "later calls cost nothing"
    )


def test_copies_and_pickles_of_a_block_that_was_not_called_yet_run_eagerly() -> None:
    block = nn.Linear(2, 2)
    compile_modules([block], "Net", EAGER, is_main=True)
    for one in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert not is_compiled(one)
        assert torch.equal(one(torch.ones(2)), block(torch.ones(2)))
