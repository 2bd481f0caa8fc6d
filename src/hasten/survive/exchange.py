"""Exchange of gradients between replicas over a group that is formed anew when its members change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.errors import StepError

_BUCKET: Final = 8 * 1024 * 1024
"""Elements that are sent together."""
_SMALL: Final = 16 * 1024
"""Elements up to which all replicas send everything to all: fewer messages, more bytes."""


class LostReplicaError(Exception):
    """Failure of an exchange, after which the members have to be asked for again."""


class ReplicaGroup:
    """A process group of the replicas of one quorum, in the order of their names."""

    def __init__(self, store: str, key: str, rank: int, size: int, timeout_s: float) -> None:
        """Connect to the others. Raises: LostReplicaError when one of them is away."""
        self.rank, self.size = rank, size
        timeout = timedelta(seconds=timeout_s)
        host, _, port = store.rpartition(":")
        try:
            self._store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
            # Any: torch's stubs leave the collectives of this class out
            self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore(key, self._store), rank, size, timeout)
        except RuntimeError as error:
            raise LostReplicaError(f"the group of {size} replicas could not be formed: {_short(error)}") from error

    def mean(
        self, parameters: Sequence[Tensor], weight: float, share: float, facts: Sequence[float]
    ) -> list[Tensor | None]:
        """Return the weighted mean of the replicas' gradients for each parameter; None if no replica has one.

        The mean is the sum of `weight` times gradient, in the order of ranks, divided by the sum of all `share`. It is the same,
        bit by bit, on all replicas. The parameters and their gradients are left as they are.

        Raises: LostReplicaError when a replica is lost; StepError when the replicas' `facts` differ.
        """
        present = [parameter.grad is not None for parameter in parameters]
        header = torch.tensor([weight, share, *facts, *map(float, present)], dtype=torch.float64)
        headers = [torch.empty_like(header) for _ in range(self.size)]
        asked = self._started("allgather", [headers], [header])
        buckets = list(_buckets(parameters))
        first = [self._send(flatten(one)) for one in buckets[:1]]
        _wait(asked)
        self._compare(headers, len(facts))
        total = sum(float(one[1]) for one in headers)
        factors = [float(one[0]) / total if total and float(one[1]) else 0.0 for one in headers]
        wanted = torch.stack([one[2 + len(facts) :] for one in headers]).sum(0)
        results: list[Tensor | None] = []
        for number, bucket in enumerate(buckets):
            sent = first[0] if number == 0 else self._send(flatten(bucket))
            reduced = self._receive(*sent, factors)
            sizes = [parameter.numel() for parameter in bucket]
            reduced = reduced[: sum(sizes)]
            results += [
                part.view(parameter.shape) for part, parameter in zip(torch.split(reduced, sizes), bucket, strict=True)
            ]
        return [one if asked_for else None for one, asked_for in zip(results, wanted.tolist(), strict=True)]

    def _compare(self, headers: list[Tensor], num_facts: int) -> None:
        for other in headers:
            if not torch.equal(other[2 : 2 + num_facts], headers[0][2 : 2 + num_facts]):
                raise StepError(
                    f"replicas differ in update, number of batches or number of parameters ({[one[2 : 2 + num_facts].tolist() for one in headers]}), "
                    "so their gradients do not belong together. Run the same script with the same settings on all replicas, without "
                    "conditions on the batch around step()."
                )

    def _started(self, collective: str, *arguments: object) -> dist.Work:
        """Start a collective of the group."""
        try:
            work: dist.Work = getattr(self._group, collective)(*arguments)
        except RuntimeError as error:  # the connection to a member is closed already
            raise LostReplicaError(_short(error)) from error
        return work

    def _send(self, flat: Tensor) -> tuple[dist.Work, Tensor, Tensor]:
        """Start to send the bucket; returns the work, the memory it fills, and the bucket, which must stay alive."""
        if flat.numel() <= _SMALL:
            found = torch.empty(self.size, flat.numel(), dtype=flat.dtype)
            return self._started("allgather", [list(found.unbind(0))], [flat]), found, flat
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % self.size))
        found = torch.empty(self.size, padded.numel() // self.size, dtype=flat.dtype)
        return self._started("alltoall_base", found.view(-1), padded, [], []), found, padded

    def _receive(self, work: dist.Work, found: Tensor, sent: Tensor, factors: list[float]) -> Tensor:
        """Return the weighted sum of the bucket over all replicas, in the order of ranks."""
        _wait(work)
        total = weighted_sum(list(found.unbind(0)), factors)
        if total.numel() == sent.numel():
            return total
        whole = torch.empty(self.size, total.numel(), dtype=total.dtype)
        _wait(self._started("allgather", [list(whole.unbind(0))], [total]))
        return whole.view(-1)

    def close(self) -> None:
        """Close the connections; replicas that wait for this one get an error at once."""
        self._group = None  # its destructor closes them


def _wait(work: dist.Work) -> None:
    try:
        work.wait()
    except RuntimeError as error:  # torch has no class for lost connections and timeouts
        raise LostReplicaError(_short(error)) from error


def weighted_sum(parts: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """Return the sum of the parts times their factors, in order; a part with the factor 0 is not read."""
    total: Tensor | None = None
    for part, factor in zip(parts, factors, strict=True):
        if factor:
            scaled = part if factor == 1.0 else part * factor
            total = scaled.clone() if total is None else total.add_(scaled)
    return torch.zeros_like(parts[0]) if total is None else total


def flatten(parameters: Sequence[Tensor]) -> Tensor:
    """Return the gradients of the parameters as one vector in host memory, with zeros for missing ones."""
    wide = torch.promote_types(parameters[0].dtype, torch.float32)
    parts = [
        torch.zeros(parameter.numel(), dtype=wide)
        if parameter.grad is None
        else _dense(parameter.grad).reshape(-1).to("cpu", wide)
        for parameter in parameters
    ]
    return torch.cat(parts)


def _dense(grad: Tensor) -> Tensor:
    if grad.layout is not torch.strided:
        raise StepError(
            f"a gradient of layout {grad.layout} cannot be exchanged between replicas, which send dense vectors. Create the embedding with "
            "sparse=False."
        )
    return grad.detach()


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield runs of parameters of one dtype of at most `_BUCKET` elements, or one larger parameter."""
    run: list[Tensor] = []
    for parameter in parameters:
        full = run and sum(one.numel() for one in run) + parameter.numel() > _BUCKET
        if run and (full or run[0].dtype != parameter.dtype):
            yield run
            run = []
        run.append(parameter)
    if run:
        yield run


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
