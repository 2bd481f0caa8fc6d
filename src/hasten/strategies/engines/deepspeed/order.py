"""The order in which gradients reach ZeRO 2, which must be the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import zip_longest
from typing import Final

import torch
from torch import Tensor

from hasten.comm.base import Comm
from hasten.errors import StepError

_MODULUS: Final = (1 << 61) - 1
_FACTOR: Final = 1_000_003


class GradientOrder:
    """Compares over the ranks, after every backward, in which order their gradients came.

    ZeRO 2 lays gradients into buckets as they come and adds the buckets of all ranks. Where a rank's gradients come in another
    order, or one does not come at all, numbers of different parameters would be added up.
    """

    def __init__(self, parameters: Mapping[str, Tensor], comm: Comm) -> None:
        self._names = list(parameters)
        self._comm = comm
        self._came: list[int] = []
        for number, parameter in enumerate(parameters.values()):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._note, number))  # type: ignore[no-untyped-call]

    def _note(self, number: int, _: Tensor) -> None:
        self._came.append(number)

    def begin(self) -> None:
        """A backward begins; one before may have failed."""
        self._came = []

    def check(self) -> None:
        """Compare the order of the backward that ends. Ranks: every rank.

        Raises: StepError on every rank, naming the first parameter that differs.
        """
        came, digest = self._came, 0
        for number in came:
            digest = (digest * _FACTOR + number + 1) % _MODULUS
        ends = self._comm.all_reduce(torch.tensor([digest, -digest]), "max").tolist()
        if ends[0] == -ends[1]:
            return
        orders: list[list[int]] = self._comm.all_gather_object(came)
        other = next(rank for rank, order in enumerate(orders) if order != orders[0])
        place, here, there = next(
            (place, *pair)
            for place, pair in enumerate(zip_longest(orders[0], orders[other], fillvalue=-1))
            if pair[0] != pair[1]
        )
        raise StepError(
            f"gradients came to ZeRO 2 in different orders: number {place + 1} of the backward was {self._name(here)} on rank "
            f"{self._comm.ranks[0]} and {self._name(there)} on rank {self._comm.ranks[other]}, so numbers of different parameters "
            "would be added up. Use the same parameters in the same order on every rank, without a forward on one rank alone, "
            "or use zero_stage 1 or 3."
        )

    def _name(self, number: int) -> str:
        return "none" if number < 0 else repr(self._names[number])
