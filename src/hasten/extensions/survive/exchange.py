"""Exchange of gradients between replicas over a group that is formed anew when its members change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.errors import StepError
from hasten.modules.names import local_tensor

_BUCKET: Final = 256 * 1024
"""Elements that are sent together: the first are on their way while the next are copied."""
_HEADER: Final = 0
"""Tag of the messages with weights and facts; those of gradients have higher ones."""


class LostReplicaError(Exception):
    """Failure of an exchange, after which the members have to be asked for again."""


class Received(NamedTuple):
    """The gradients of all replicas, which have arrived and are not written to the parameters."""

    buckets: Sequence[Bucket]
    wanted: list[bool]
    """Parameters of which some replica has a gradient, in the order of the buckets."""
    asks: int
    """1 if a replica wants to ask for the members of the next update, 2 to end the run as well; equal on all replicas."""

    def write(self) -> None:
        """Set the gradients to their mean; it cannot fail."""
        wanted = iter(self.wanted)
        for bucket in self.buckets:
            bucket.write([next(wanted) for _ in bucket.parameters])


class ReplicaGroup:
    """A process group of the replicas of one quorum, in the order of their names."""

    def __init__(
        self, store: str, key: str, rank: int, size: int, timeout_s: float
    ) -> None:
        """Connect to the others. Raises: LostReplicaError when one of them is away."""
        self.rank, self.size = rank, size
        self.timeout_s = timeout_s
        """Seconds for which `average` waits for a message."""
        timeout = timedelta(seconds=timeout_s)
        host, _, port = store.rpartition(":")
        try:
            self._store = dist.TCPStore(
                host, int(port), is_master=False, timeout=timeout
            )
            # Any: torch's stubs leave the collectives of this class out
            self._group: Any = dist.ProcessGroupGloo(
                dist.PrefixStore(key, self._store), rank, size, timeout
            )
        except RuntimeError as error:
            raise LostReplicaError(
                f"the group of {size} replicas could not be formed: {_short(error)}"
            ) from error
        self._buckets: list[Bucket] = []
        self._parameters: list[Tensor] = []

    def _bucketed(self, parameters: Sequence[Tensor]) -> list[Bucket]:
        """Return the buckets of these parameters."""
        same = len(parameters) == len(self._parameters) and all(
            map(lambda a, b: a is b, parameters, self._parameters)
        )
        if not same:
            self._parameters = list(parameters)
            runs = enumerate(_runs(parameters))
            self._buckets = [
                Bucket(run, self.rank, self.size, 2 * number + 1)
                for number, run in runs
            ]
        return self._buckets

    def receive(
        self,
        parameters: Sequence[Tensor],
        weight: float,
        share: float,
        facts: Sequence[float],
        asks: int = 0,
    ) -> Received:
        """Return the gradients of all replicas, of which `write` makes the weighted mean; it stays None if no replica has one.

        The mean is the sum of `weight` times gradient, in the order of ranks, divided by the sum of all `share`. It is the same,
        bit by bit, on all replicas. Of sharded parameters, the shards of this rank are exchanged.

        Returns: with the largest `asks` of all replicas: 1 to ask for the members of the next update, 2 to end the run as well.
        Raises: LostReplicaError when a replica is lost; StepError when the replicas' `facts` differ. The gradients are then unchanged.
        """
        buckets = self._bucketed(parameters)
        works = [self._exchanged(bucket.tag, *bucket.filled()) for bucket in buckets]
        present = [
            parameter.grad is not None
            for bucket in buckets
            for parameter in bucket.parameters
        ]
        headers = self._headers([weight, share, asks, *facts, *present])
        self._compare([one[3 : 3 + len(facts)] for one in headers])
        total = sum(one[1] for one in headers)
        factors = [one[0] / total if total and one[1] else 0.0 for one in headers]
        self._receive(buckets, works, factors)
        wanted = [
            any(several)
            for several in zip(*(one[3 + len(facts) :] for one in headers), strict=True)
        ]
        return Received(buckets, wanted, int(max(one[2] for one in headers)))

    def _headers(self, own: Sequence[float]) -> list[list[float]]:
        """Return these numbers of all replicas, in the order of their names."""
        sent = torch.tensor(own, dtype=torch.float64)
        rows = sent.repeat(self.size, 1)
        self._wait(self._exchanged(_HEADER, [sent] * self.size, list(rows)))
        found: list[list[float]] = rows.tolist()
        return found

    def _receive(
        self,
        buckets: Sequence[Bucket],
        works: Sequence[Sequence[dist.Work]],
        factors: list[float],
    ) -> None:
        """Wait for the gradients of this replica's slices, sum them, and exchange the sums."""
        sums: list[dist.Work] = []
        for bucket, messages in zip(buckets, works, strict=True):
            self._wait(messages)
            total = weighted_sum(list(bucket.rows), factors, bucket.sent[self.rank])
            sums += self._exchanged(
                bucket.tag + 1, [total] * self.size, list(bucket.sent)
            )
        self._wait(sums)

    def _compare(self, facts: list[list[float]]) -> None:
        if any(other != facts[0] for other in facts):
            raise StepError(
                f"replicas differ in update, number of batches or number of parameters ({facts}), "
                "so their gradients do not belong together. Run the same script with the same settings on all replicas, without "
                "conditions on the batch around step()."
            )

    def _exchanged(
        self, tag: int, given: Sequence[Tensor], found: Sequence[Tensor]
    ) -> list[dist.Work]:
        """Start to send a tensor to each other replica, and to receive one from each."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            works = [self._group.recv([found[rank]], rank, tag) for rank in others]
            return works + [
                self._group.send([given[rank]], rank, tag) for rank in others
            ]
        except RuntimeError as error:  # the connection to a member is closed already
            raise LostReplicaError(_short(error)) from error

    def _wait(self, works: Sequence[dist.Work]) -> None:
        timeout = timedelta(seconds=self.timeout_s)
        try:
            for work in works:
                work.wait(timeout)
        # torch has no class for lost connections and timeouts
        except RuntimeError as error:
            raise LostReplicaError(_short(error)) from error

    def close(self) -> None:
        """Close the connections; replicas that wait for this one get an error at once."""
        # their messages hold the connections open
        self._buckets, self._parameters = [], []
        self._group = None  # its destructor closes them


class Bucket:
    """Memory of the gradients of some parameters, in one slice for each replica, which sums it."""

    def __init__(
        self, parameters: Sequence[Tensor], rank: int, size: int, tag: int
    ) -> None:
        self.parameters = list(parameters)
        self._shapes = [
            local_tensor(parameter.detach()).shape for parameter in parameters
        ]
        self.tag = tag
        self._sizes = [shape.numel() for shape in self._shapes]
        self._number = sum(self._sizes)
        self._rank = rank
        wide = torch.promote_types(parameters[0].dtype, torch.float32)
        self.sent = torch.zeros(size, -(-self._number // size), dtype=wide)
        """The slices of this replica's gradients; after the exchange, those of the mean."""
        self.rows = torch.zeros_like(self.sent)
        """This replica's slice, of the gradients of each replica."""
        self._views = self._parts(self.sent.view(-1))

    @torch.no_grad()
    def filled(self) -> tuple[list[Tensor], list[Tensor]]:
        """Copy the gradients of this replica into the bucket, with zeros for missing ones.

        Returns: what is sent to each replica, and where its own is received.
        """
        for part, parameter in zip(self._views, self.parameters, strict=True):
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(_dense(parameter.grad))
        self.rows[self._rank].copy_(self.sent[self._rank])
        return list(self.sent), list(self.rows)

    @torch.no_grad()
    def write(self, wanted: Sequence[bool]) -> None:
        """Set the gradients to their mean, where some replica has one."""
        for parameter, mean, has_one in zip(
            self.parameters, self._views, wanted, strict=True
        ):
            if has_one:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                local_tensor(parameter.grad).copy_(mean)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """Return the views of a vector that belong to the parameters."""
        split = torch.split(flat[: self._number], self._sizes)
        return [
            part.view(shape) for part, shape in zip(split, self._shapes, strict=True)
        ]


def weighted_sum(
    parts: Sequence[Tensor], factors: Sequence[float], out: Tensor | None = None
) -> Tensor:
    """Return the sum of the parts times their factors, in order, in `out` if given; a part with the factor 0 is not read.

    Equal factors are applied once, to the sum. With different ones the parts are overwritten. `out` may be the first part.
    """
    out = torch.empty_like(parts[0]) if out is None else out
    used = [
        (part, factor) for part, factor in zip(parts, factors, strict=True) if factor
    ]
    if not used:
        return out.zero_()
    (first, common), *others = used
    if any(factor != common for _, factor in others):
        for part, factor in used:
            part.mul_(factor)
        common = 1.0
    if not others:
        out.copy_(first)
    for part, _ in others:
        torch.add(first, part, out=out)
        first = out
    return out if common == 1.0 else out.mul_(common)


@torch.no_grad()
def alone(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply the gradients of the only replica; the common factor is one."""
    if factor == 1.0:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def _dense(grad: Tensor) -> Tensor:
    if grad.layout is not torch.strided:
        raise StepError(
            f"a gradient of layout {grad.layout} cannot be exchanged between replicas, which send dense vectors. Create the embedding with "
            "sparse=False."
        )
    return local_tensor(grad.detach())


def _runs(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield runs of parameters of one dtype of at least `_BUCKET` elements, where there are as many."""
    run: list[Tensor] = []
    for parameter in parameters:
        if run and run[0].dtype != parameter.dtype:
            yield run
            run = []
        run.append(parameter)
        if sum(local_tensor(one.detach()).numel() for one in run) >= _BUCKET:
            yield run
            run = []
    if run:
        yield run


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
