"""Gradients of earlier micro-steps, set aside while a step may have to be undone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hasten.optim.gradients import alike


class SetAside:
    """Takes the gradients from parameters, so that what a step adds lies alone; costs memory only inside a window."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._kept = [parameter.grad for parameter in self._parameters]
        self.discard()

    def discard(self) -> None:
        """Drop what the step has added."""
        for parameter in self._parameters:
            parameter.grad = None

    def present(self, parameters: Iterable[Tensor]) -> list[int]:
        """1 for each parameter that has a gradient, set aside or added since; 0 for the others."""
        there = {
            id(parameter)
            for parameter, kept in zip(self._parameters, self._kept, strict=True)
            if kept is not None or parameter.grad is not None
        }
        return [int(id(parameter) in there) for parameter in parameters]

    def put_back(self) -> None:
        """Give the parameters the gradients they had, and no others."""
        for parameter, kept in zip(self._parameters, self._kept, strict=True):
            parameter.grad = kept
        self._kept = []

    @torch.no_grad()
    def add(self) -> None:
        """Give the parameters the gradients they had plus what the step has added."""
        old: list[Tensor] = []
        new: list[Tensor] = []
        for parameter, kept in zip(self._parameters, self._kept, strict=True):
            added = parameter.grad
            if kept is None:
                continue
            parameter.grad = kept
            if added is None:
                continue
            if added.is_sparse or kept.is_sparse:
                parameter.grad = kept + added
            else:
                old.append(kept)
                new.append(added)
        for kept_alike, added_alike in zip(alike(old), alike(new), strict=True):
            torch._foreach_add_(kept_alike, added_alike)
        self._kept = []
