"""Optimizers for a model whose parameters need different algorithms: `hasten.optimizers`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from hasten.errors import ConfigError
from hasten.extensions.muon.muon import Muon
from hasten.modules.names import named_parameters
from hasten.runtime.logs import on_main

_HEADS: Final = frozenset(
    {
        "lm_head",
        "head",
        "heads",
        "output",
        "classifier",
        "score",
        "cls",
        "embed_out",
        "output_layer",
        "qa_outputs",
    }
)
"""Names that models give to the layer that produces their outputs."""
_CONVOLUTIONS: Final = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_SHOWN: Final = 3


@dataclass(slots=True)
class ParameterSplit:
    """Parameters of a model by the optimizer that updates them, each with the reason."""

    muon: dict[str, nn.Parameter] = field(default_factory=dict)
    adamw: dict[str, nn.Parameter] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the split as a table with one line per optimizer and reason."""
        lines = []
        for title, members in (("Muon", self.muon), ("AdamW", self.adamw)):
            by_reason: dict[str, list[str]] = {}
            for parameter_name in members:
                by_reason.setdefault(self.reasons[parameter_name], []).append(
                    parameter_name
                )
            for reason, parameter_names in by_reason.items():
                num_values = sum(members[name].numel() for name in parameter_names)
                num_hidden_text = ""
                if len(parameter_names) > _SHOWN:
                    num_hidden_text = f", and {len(parameter_names) - _SHOWN} more"
                lines.append(
                    f"{title:<6} {len(parameter_names):>4} tensors {num_values:>14,} values  {reason}: "
                    f"{', '.join(parameter_names[:_SHOWN])}{num_hidden_text}"
                )
        return "\n".join(lines)


def optimizers(
    model: nn.Module,
    kind: Literal["muon"] = "muon",
    *,
    lr: float = 0.02,
    adamw_lr: float = 3e-4,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    adamw: Sequence[str] = (),
    show: bool = True,
    **muon_options: Any,  # Any: options of Muon
) -> list[Optimizer]:
    """Return Muon for the model's hidden matrices and AdamW for its other parameters.

    Embeddings, output heads, convolutions, biases and other vectors go to AdamW, and every parameter whose name matches a
    regular expression of `adamw`; 3-D stacks of expert weights go to Muon, matrix by matrix. `show` prints the split on
    the main process. Pass all optimizers to `prepare()` and step each of them; frozen parameters are left out.

    Example:
        optimizers = hasten.optimizers(model, kind="muon", lr=0.02, adamw_lr=3e-4)
        model, *optimizers = accelerator.prepare(model, *optimizers)

    Raises: ConfigError for an unknown kind, a pattern that matches nothing, or a model without trainable parameters.
    """
    if kind != "muon":
        raise ConfigError(
            f"optimizers(kind={kind!r}) is unknown; 'muon' is the kind that needs a split of the parameters. Create other "
            "optimizers directly, such as torch.optim.AdamW(model.parameters())."
        )
    split = split_parameters(model, adamw)
    if show:
        on_main(lambda: sys.stderr.write(f"{split}\n"))
    model_optimizers: list[Optimizer] = []
    if split.muon:
        model_optimizers.append(
            Muon(
                list(split.muon.items()),
                lr=lr,
                weight_decay=weight_decay,
                **muon_options,
            )
        )
    if split.adamw:
        decayed_parameters = []
        free_parameters = []
        for parameter_name, parameter in split.adamw.items():
            if parameter.ndim >= 2:
                decayed_parameters.append((parameter_name, parameter))
            else:
                free_parameters.append((parameter_name, parameter))
        groups = [
            {"params": decayed_parameters, "weight_decay": weight_decay},
            {"params": free_parameters, "weight_decay": 0.0},
        ]
        can_fuse = all(
            parameter.device.type == "cuda" for parameter in split.adamw.values()
        )
        filled_groups = [group for group in groups if group["params"]]
        model_optimizers.append(
            AdamW(filled_groups, lr=adamw_lr, betas=betas, fused=can_fuse or None)
        )
    return model_optimizers


def split_parameters(model: nn.Module, adamw: Sequence[str] = ()) -> ParameterSplit:
    """Split the trainable parameters between Muon and AdamW.

    Raises: ConfigError if a pattern matches no parameter, or the model has no trainable parameters.
    """
    split = ParameterSplit()
    special_reasons: dict[int, str] = {}
    for parameter_id, reason_found in _find_special_parameters(model):
        special_reasons.setdefault(
            parameter_id, reason_found
        )  # a tied head is an embedding
    matched_patterns: set[str] = set()
    for parameter_name, parameter in named_parameters(model):
        if not parameter.requires_grad:
            continue
        pattern = next(
            (pattern for pattern in adamw if re.search(pattern, parameter_name)), None
        )
        if pattern is not None:
            matched_patterns.add(pattern)
            reason: str | None = f"matches {pattern!r}"
        else:
            reason = special_reasons.get(id(parameter)) or _reason_for_adamw(
                parameter_name, parameter
            )
        (split.muon if reason is None else split.adamw)[parameter_name] = parameter
        split.reasons[parameter_name] = reason or (
            "hidden matrix" if parameter.ndim == 2 else "stack of hidden matrices"
        )
    unused_patterns = []
    for pattern in adamw:
        if not any(map(re.compile(pattern).search, split.reasons)):
            unused_patterns.append(pattern)
    if unused_patterns:
        raise ConfigError(
            f"optimizers(adamw={list(adamw)}): {unused_patterns[0]!r} matches no trainable parameter of {type(model).__name__}, such as "
            f"{list(split.reasons)[:3]}; correct the pattern or remove it."
        )
    if not split.reasons:
        raise ConfigError(
            f"{type(model).__name__} has no trainable parameters, so there is nothing to optimize; set requires_grad=True on "
            "the parameters to train before calling optimizers()."
        )
    return split


def _reason_for_adamw(name: str, parameter: nn.Parameter) -> str | None:
    if parameter.ndim < 2:
        return "vector or scalar"
    if "embed" in name.lower():
        return "embedding"
    if parameter.ndim > 3 or (parameter.ndim == 3 and parameter.shape[0] == 1):
        return "neither a matrix nor a stack of matrices"
    return None


def _find_special_parameters(model: nn.Module) -> Iterator[tuple[int, str]]:
    """Yield the ids of parameters that Muon does not suit because of their module, with the reason."""
    vocabulary_sizes: set[int] = set()
    heads: list[nn.Module] = []
    last_layer: nn.Module | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            vocabulary_sizes.add(module.num_embeddings)
            yield id(module.weight), "embedding"
        elif isinstance(module, _CONVOLUTIONS):
            yield id(module.weight), "convolution"
        elif (
            isinstance(weight := getattr(module, "weight", None), torch.Tensor)
            and weight.ndim == 2
        ):
            last_layer = module
            if name.rpartition(".")[2] in _HEADS:
                heads.append(module)
    output_layer = getattr(model, "get_output_embeddings", lambda: None)()
    heads += [module for module in (output_layer,) if isinstance(module, nn.Module)]
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.out_features in vocabulary_sizes:
            heads.append(module)
    if not heads and last_layer is not None:
        heads = [last_layer]
    for module in heads:
        for parameter in module.parameters():
            if parameter.ndim >= 2:
                yield id(parameter), "output head"
