"""Models with a chunked loss train as without it, and their logits are there for whoever reads them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasten.errors import PrepareError, StepError
from hasten.extensions.chunked_loss.logits import LazyLogits, use_chunked_loss
from hasten.modules import forwarding
from hasten.testing.toys import TinyLM, next_token_loss, seeded

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": 97,
    "d_model": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {**SIZES, "tie_word_embeddings": True}),
    # a soft cap
    "Gemma2": ("Gemma2ForCausalLM", {**SIZES, "final_logit_softcapping": 3.0}),
    "Cohere": ("CohereForCausalLM", {**SIZES, "logit_scale": 0.3}),  # a factor
    "Granite": ("GraniteForCausalLM", {**SIZES, "logits_scaling": 3.0}),  # a divisor
    "T5": (
        "T5ForConditionalGeneration",
        {
            **ENCODER_DECODER,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 1,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    "Bart": (  # a bias added to the logits
        "BartForConditionalGeneration",
        {
            **ENCODER_DECODER,
            **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
            "dropout": 0.0,
        },
    ),
    "Bert": (  # a masked language model, whose head has a bias
        "BertForMaskedLM",
        {
            **{
                key: SIZES[key]
                for key in (
                    "vocab_size",
                    "hidden_size",
                    "intermediate_size",
                    "num_hidden_layers",
                    "num_attention_heads",
                )
            },
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
}


def tiny() -> TinyLM:
    return seeded(lambda: TinyLM(vocab=19, width=8, heads=2, depth=1, context=6))


def chunked(model: nn.Module, head: str | None = None) -> Any:
    """Return a copy of the model with a chunked loss."""
    copied = copy.deepcopy(model)
    use_chunked_loss(copied, head, chunk_tokens=4)
    return copied


def tokens() -> Tensor:
    return torch.randint(0, 19, (3, 6), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", list(MODELS))
def test_transformers_models_train_as_without_it(name: str) -> None:
    """float32 differs by the order of sums; bf16 by one rounding of the head's gradients (2^-8)."""
    transformers = pytest.importorskip("transformers")
    cls, sizes = MODELS[name]
    torch.manual_seed(0)
    model_class = getattr(transformers, cls)
    model = model_class(model_class.config_class(**sizes))
    ids = torch.randint(3, 97, (3, 9))
    labels = ids.clone()
    labels[0, :4] = -100
    for amp, tolerance in ((False, 1e-5), (True, 1e-2)):
        plain_model, chunked_model = copy.deepcopy(model), chunked(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            expected, actual = (
                plain_model(input_ids=ids, labels=labels),
                chunked_model(input_ids=ids, labels=labels),
            )
        assert isinstance(actual.logits, LazyLogits)
        assert actual.logits.shape == expected.logits.shape
        assert actual.logits.dtype == expected.logits.dtype
        torch.testing.assert_close(
            actual.logits.detach(),
            expected.logits.detach(),
            rtol=tolerance,
            atol=tolerance,
        )
        torch.testing.assert_close(actual.loss, expected.loss, rtol=tolerance, atol=0)
        actual.loss.backward()
        expected.loss.backward()
        for chunked_parameter, plain_parameter in zip(
            chunked_model.parameters(), plain_model.parameters(), strict=True
        ):
            if plain_parameter.grad is not None:
                torch.testing.assert_close(
                    chunked_parameter.grad,
                    plain_parameter.grad,
                    rtol=0,
                    atol=tolerance * max(1.0, float(plain_parameter.grad.norm())),
                )


def test_a_tokens_share_of_a_larger_batch_is_divided_by_its_number() -> None:
    """transformers' num_items_in_batch: a sum, divided by the tokens of the whole window."""
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    ids = torch.randint(3, 97, (2, 5))
    expected = model(
        input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(40)
    ).loss
    torch.testing.assert_close(
        chunked(model)(
            input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(40)
        ).loss,
        expected,
    )


def test_a_loss_outside_the_model_is_chunked_too() -> None:
    model = tiny()
    chunked_model = chunked(model, "head")
    logits = chunked_model(tokens())
    assert isinstance(logits[:, :-1].float().contiguous().view(-1, 19), LazyLogits)
    loss, expected = (
        next_token_loss(logits, tokens()),
        next_token_loss(model(tokens()), tokens()),
    )
    torch.testing.assert_close(loss, expected)
    for a, b in zip(
        torch.autograd.grad(loss, list(chunked_model.parameters())),
        torch.autograd.grad(expected, list(model.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


READERS: dict[str, Any] = {
    "argmax": lambda x: x.argmax(-1),
    "softmax": lambda x: F.softmax(x, -1),
    "one class": lambda x: x[..., 3],
    "concatenated": lambda x: torch.cat([x, x], 1),
    "second argument": lambda x: torch.ones_like(x) * x,
    "in a list": lambda x: torch.stack([x, x]),
    "other shape": lambda x: x.reshape(-1, 57),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "class weights": lambda x: F.cross_entropy(
        x.flatten(0, 1), tokens().flatten(), weight=torch.arange(19.0)
    ),
    "probabilities": lambda x: F.cross_entropy(
        x.flatten(0, 1), torch.full((18, 19), 1 / 19)
    ),
    "classes second": lambda x: F.cross_entropy(x.transpose(1, 2), tokens()),
    "capped twice": lambda x: torch.tanh(torch.tanh(x * 2) * 3),
    "capped": lambda x: F.cross_entropy(
        (torch.tanh(x / 2) * 2).flatten(0, 1), tokens().flatten(), label_smoothing=0.1
    ),
    "scaled by a tensor": lambda x: x * torch.tensor(2.0),
    "double": lambda x: x.double(),
    "rows": lambda x: x[:, torch.tensor([0, 2])],
    "mask": lambda x: x[tokens() > 9],
    "list": lambda x: torch.tensor(x.tolist()),
}


@pytest.mark.parametrize("reader", list(READERS))
def test_whatever_reads_the_logits_gets_those_of_the_model(reader: str) -> None:
    read = READERS[reader]
    with torch.no_grad():
        actual, expected = (
            read(model(tokens())).detach()
            for model in (chunked(tiny(), "head"), tiny())
        )
    assert type(actual) is Tensor
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_changes_in_place_are_kept() -> None:
    logits, expected = chunked(tiny(), "head")(tokens()), tiny()(tokens())
    for values in (logits, expected):
        values[..., 0] = -9.0
        values.mul_(2)
    torch.testing.assert_close(logits.detach(), expected.detach())
    torch.testing.assert_close(
        F.cross_entropy(logits.flatten(0, 1), tokens().flatten()),
        F.cross_entropy(expected.flatten(0, 1), tokens().flatten()),
    )


def test_reading_logits_after_the_weights_changed_is_refused() -> None:
    model = chunked(tiny(), "head")
    optimizer = torch.optim.AdamW(model.parameters())
    logits = model(tokens())
    torch.autograd.backward(next_token_loss(logits, tokens()))
    assert logits.argmax(-1).shape == (3, 6)
    optimizer.step()
    with pytest.raises(
        StepError,
        match=r"have been changed since the forward pass.*before optimizer.step",
    ):
        logits.argmax(-1)
    with pytest.raises(StepError, match="have been changed"):
        next_token_loss(logits, tokens())


def test_raw_collectives_cannot_take_the_hidden_states_for_logits() -> None:
    """It has no storage: what passes torch's functions by fails instead of sending something else."""
    logits = chunked(tiny(), "head")(tokens())
    with torch._C.DisableTorchFunctionSubclass():
        assert logits.is_meta
        assert logits.shape == (3, 6, 19)


# torch's own, while it traces
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_model_with_it_compiles_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    # else torch leaves its thread
    monkeypatch.setattr(pytest.importorskip("tqdm").tqdm, "monitor_interval", 0)
    model = tiny()
    chunked_model = chunked(model, "head")

    def loss_of(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = net(x)
        return next_token_loss(logits, x), logits

    compiled: Any = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    loss, logits = compiled(chunked_model, tokens())
    expected, full_logits = loss_of(model, tokens())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        logits.detach(), full_logits.detach(), rtol=1e-5, atol=1e-6
    )
    for a, b in zip(
        torch.autograd.grad(loss, list(chunked_model.parameters())),
        torch.autograd.grad(expected, list(model.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_copies_and_pickles_use_their_own_head() -> None:
    model = chunked(tiny(), "head")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            copied.head.weight.zero_()
        assert not copied(tokens()).any()
    assert model(tokens()).any()
    assert list(model.state_dict()) == list(tiny().state_dict())


def test_it_is_removed_by_its_tag_and_repeated_without_stacking() -> None:
    model = chunked(tiny(), "head")
    use_chunked_loss(model, model.head)
    assert forwarding.restore(model.head, forwarding.LateHead.tag)
    assert type(model(tokens())) is Tensor


def test_heads_that_cannot_be_chunked_are_named() -> None:
    with pytest.raises(
        PrepareError,
        match=r"Name the layer with head=; its last linear layer is 'head'",
    ):
        use_chunked_loss(tiny())

    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    model = tiny()
    model.head = Adapted(8, 19)
    with pytest.raises(PrepareError, match=r"the head 'head' of TinyLM is a Adapted"):
        use_chunked_loss(model, "head")
