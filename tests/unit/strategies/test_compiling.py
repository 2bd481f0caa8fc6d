"""Compiling blocks of any class, the loss and norms of a transformers model beside them, and the wait."""

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
from hasten.strategies.compiling import (
    CompiledForward,
    CompiledLoss,
    compile_modules,
    compile_rest,
    count_graphs,
    is_compiled,
    remove_all_compiled,
)
from hasten.testing.toys import seeded

EAGER = {"backend": "eager"}  # traced, and run as it was: no code is generated
TOKENS = torch.arange(12).view(2, 6)


def small_llama() -> Any:  # Any: a model of transformers
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


def loss_and_gradients(model: Any) -> tuple[Tensor, list[Tensor]]:
    loss: Tensor = model(input_ids=TOKENS, labels=TOKENS).loss
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.fixture(scope="module")
def expected() -> tuple[Tensor, list[Tensor]]:
    return loss_and_gradients(small_llama())


# torch 2.13, while it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_loss_and_the_norm_are_compiled_and_train_alike(
    expected: tuple[Tensor, list[Tensor]],
) -> None:
    model = small_llama()
    compiled_names = compile_rest(model, EAGER)
    assert compiled_names == ["model.norm", "the loss of LlamaForCausalLM"]
    assert isinstance(model.loss_function, CompiledLoss)
    assert compile_rest(model, EAGER) == [], "twice is once"
    torch.testing.assert_close(loss_and_gradients(model), expected, rtol=0, atol=1e-7)
    with torch.no_grad():  # the function itself
        torch.testing.assert_close(
            model(input_ids=TOKENS, labels=TOKENS).loss, expected[0], rtol=0, atol=1e-7
        )
    remove_all_compiled(model)
    assert not any(is_compiled(module) for module in model.modules())
    assert not isinstance(model.loss_function, CompiledLoss)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_copies_and_pickles_hold_the_loss_function_itself(
    copied: Callable[[Any], Any],
) -> None:
    model = small_llama()
    plain = model.loss_function
    compile_rest(model, EAGER)
    assert copied(model).loss_function is plain


def test_the_loss_is_compiled_with_blocks_only() -> None:
    with pytest.raises(
        ConfigError,
        match="the whole model is one graph with its loss; set use_regional_compilation",
    ):
        Accelerator(cpu=True, dynamo_plugin={"backend": "eager", "compile_loss": True})
    with pytest.raises(ConfigError, match="nothing is compiled"):
        Accelerator(cpu=True, dynamo_plugin={"compile_loss": True})


@pytest.mark.parametrize(("number", "is_main"), [(3, True), (1, True), (3, False)])
def test_the_first_calls_of_compiled_blocks_are_shown_and_logged_once(
    number: int,
    is_main: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines: list[str] = []

    @contextmanager
    def shown(text: Callable[[float], str]) -> Iterator[None]:
        lines.append(text(12.4))
        yield

    monkeypatch.setattr(compiling, "waiting_line", shown)
    torch._dynamo.reset()
    blocks = [nn.Linear(2, 2) for _ in range(number)]
    plain = [block(torch.ones(2)) for block in blocks]
    with caplog.at_level(logging.INFO, logger="hasten"):
        compile_modules(blocks, "Net", EAGER, is_main)
        for _ in range(2):
            assert all(
                torch.equal(block(torch.ones(2)), out)
                for block, out in zip(blocks, plain, strict=True)
            )
    expected_lines = {
        (3, True): [
            f"compiling Net, block {block_number} of 3, 12 s"
            for block_number in (1, 2, 3)
        ],
        (1, True): ["compiling Net, 12 s"],
        (3, False): [],
    }
    assert [line.replace(", 13 s", ", 12 s") for line in lines] == expected_lines[
        number, is_main
    ]
    messages = [
        record.getMessage()
        for record in caplog.records
        if "compiled" in record.getMessage()
    ]
    title = "Net" if number == 1 else "the 3 blocks of Net"
    assert [line.rpartition(" in ")[0] for line in messages] == (
        [f"compiled {title}"] if is_main else []
    )
    assert all(line.endswith(" s (1 graph)") for line in messages), (
        "equal blocks share one"
    )
    assert not any(
        isinstance(block._compiled_call_impl, compiling._FirstCall) for block in blocks
    ), "later calls cost nothing"


def encoder() -> nn.Module:
    """A model whose blocks are a class of torch, which the compiler skips if it is given them as they are."""
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(4, 8),
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 3
            ),
            nn.Linear(8, 1),
        )
    )


# torch 2.13, while it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("regional", [True, False])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_blocks_and_models_of_torchs_own_classes_are_compiled(
    regional: bool, precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    inputs = torch.randn(2, 5, 4)
    gradients: list[list[Tensor]] = []
    for plugin in ({}, {"backend": "eager", "use_regional_compilation": regional}):
        accelerator = Accelerator(
            cpu=True, mixed_precision=precision, dynamo_plugin=plugin
        )
        model = accelerator.prepare(encoder())
        with caplog.at_level(logging.INFO, logger="hasten"):
            accelerator.backward(model(inputs).pow(2).sum())
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert count_graphs() > 0
    title = "the 3 blocks of Sequential" if regional else "Sequential"
    (line,) = [
        record.getMessage()
        for record in caplog.records
        if "compiled" in record.getMessage()
    ]
    assert line.startswith(f"compiled {title} in ")
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)
    bare = accelerator.unwrap_model(model, keep_torch_compile=False)
    assert not any(is_compiled(module) for module in bare.modules())
    assert not any(
        forwarding.find(module, CompiledForward.tag) for module in bare.modules()
    )


def test_each_model_of_a_class_of_torch_has_code_to_itself() -> None:
    """The compiler gives up on code that was compiled for eight different models."""
    torch._dynamo.reset()
    for width in range(2, 12):
        model = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        num_graphs = count_graphs()
        compile_modules([model], "Sequential", EAGER, is_main=False)
        for rows in (2, 3):
            model(torch.ones(rows, width))
        assert count_graphs() > num_graphs, width


class UncompilableModel(nn.Module):
    """A model that torch's compiler skips."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def test_a_setting_that_compiles_nothing_is_an_error_and_a_choice_of_ours_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    required_module, automatic_module = UncompilableModel(), UncompilableModel()
    compile_modules([required_module], "Skipped", EAGER, is_main=True)
    compile_modules([automatic_module], "Skipped", EAGER, is_main=True, automatic=True)
    for _ in range(2):
        required_module(torch.ones(2))
        automatic_module(torch.ones(2))
    with pytest.raises(
        ConfigError,
        match=r"nothing of Skipped was compiled.*Remove torch\.compiler\.disable",
    ):
        required_module(torch.ones(2))
    assert not caplog.records
    automatic_module(torch.ones(2))
    assert (
        "performance: Skipped is not compiled: torch's compiler skipped its code"
        in caplog.text
    )
    assert not is_compiled(automatic_module)


def test_a_compiler_that_fails_ends_no_training_that_did_not_ask_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such kernel")

    torch._dynamo.reset()
    blocks = [nn.Linear(2, 2) for _ in range(2)]
    compile_modules(blocks, "Net", {"backend": failing}, is_main=True, automatic=True)
    assert torch.equal(blocks[0](torch.ones(2)), blocks[0].forward(torch.ones(2)))
    assert "Net is not compiled: torch's compiler failed" in caplog.text
    assert not any(is_compiled(block) for block in blocks)
    compile_modules(blocks, "Net", {"backend": failing}, is_main=True)
    with pytest.raises(RuntimeError, match="no such kernel"):
        blocks[0](torch.ones(2))


def test_copies_and_pickles_of_a_block_that_was_not_called_yet_run_eagerly() -> None:
    block = nn.Linear(2, 2)
    compile_modules([block], "Net", EAGER, is_main=True)
    for block_copy in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert not is_compiled(block_copy)
        assert torch.equal(block_copy(torch.ones(2)), block(torch.ones(2)))
