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

_BUCKET_ELEMENTS: Final = 256 * 1024
"""Elements that are sent together: the first are on their way while the next are copied."""
_HEADER_TAG: Final = 0
"""Tag of the messages with weights and facts; those of gradients have higher ones."""


class LostReplicaError(Exception):
    """Failure of an exchange, after which the members have to be asked for again."""


class Received(NamedTuple):
    """The gradients of all replicas, which have arrived and are not written to the parameters."""

    buckets: Sequence[Bucket]
    has_gradient: list[bool]
    """Parameters of which some replica has a gradient, in the order of the buckets."""
    request: int
    """1 if a replica wants to ask for the members of the next update, 2 to end the run as well; equal on all replicas."""

    def write_means(self) -> None:
        """Set the gradients to their mean; it cannot fail."""
        has_gradient = iter(self.has_gradient)
        for bucket in self.buckets:
            bucket.write_means([next(has_gradient) for parameter in bucket.parameters])


class ReplicaGroup:
    """A process group of the replicas of one quorum, in the order of their names."""

    def __init__(
        self, store_address: str, group_key: str, rank: int, size: int, timeout_s: float
    ) -> None:
        """Connect to the others. Raises: LostReplicaError when one of them is away."""
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        """Seconds for which `average` waits for a message."""
        timeout = timedelta(seconds=timeout_s)
        host, _, port = store_address.rpartition(":")
        try:
            self._store = dist.TCPStore(
                host, int(port), is_master=False, timeout=timeout
            )
            # Any: torch's stubs leave the collectives of this class out
            self._group: Any = dist.ProcessGroupGloo(
                dist.PrefixStore(group_key, self._store), rank, size, timeout
            )
        except RuntimeError as error:
            raise LostReplicaError(
                f"the group of {size} replicas could not be formed: {_first_line(error)}"
            ) from error
        self._buckets: list[Bucket] = []
        self._parameters: list[Tensor] = []

    def _fill_buckets(self, parameters: Sequence[Tensor]) -> list[Bucket]:
        """Return the buckets of these parameters."""
        # by identity: tensors compare their elements
        if list(map(id, parameters)) != list(map(id, self._parameters)):
            self._parameters = list(parameters)
            self._buckets = []
            for run_number, parameter_run in enumerate(_split_into_runs(parameters)):
                bucket_tag = 2 * run_number + 1
                self._buckets.append(
                    Bucket(parameter_run, self.rank, self.size, bucket_tag)
                )
        return self._buckets

    def receive_gradients(
        self,
        parameters: Sequence[Tensor],
        weight: float,
        weight_share: float,
        facts: Sequence[float],
        own_request: int = 0,
    ) -> Received:
        """Return the gradients of all replicas, of which `write` makes the weighted mean; it stays None if no replica has one.

        The mean is the sum of `weight` times gradient, in the order of ranks, divided by the sum of all `share`. It is the same,
        bit by bit, on all replicas. Of sharded parameters, the shards of this rank are exchanged.

        Returns: with the largest `asks` of all replicas: 1 to ask for the members of the next update, 2 to end the run as well.
        Raises: LostReplicaError when a replica is lost; StepError when the replicas' `facts` differ. The gradients are then unchanged.
        """
        buckets = self._fill_buckets(parameters)
        pending_works = [
            self._start_exchange(bucket.tag, *bucket.copy_gradients())
            for bucket in buckets
        ]
        has_local_gradient = []
        for bucket in buckets:
            for parameter in bucket.parameters:
                has_local_gradient.append(parameter.grad is not None)
        headers = self._exchange_headers(
            [weight, weight_share, own_request, *facts, *has_local_gradient]
        )
        self._compare_facts([header[3 : 3 + len(facts)] for header in headers])
        total_share = sum(header[1] for header in headers)
        factors = []
        for replica_weight, share, *_ in headers:
            factors.append(replica_weight / total_share if share else 0.0)
        self._sum_slices(buckets, pending_works, factors)
        gradient_flags = [header[3 + len(facts) :] for header in headers]
        has_gradient = list(map(any, zip(*gradient_flags, strict=True)))
        largest_request = max(header[2] for header in headers)
        return Received(buckets, has_gradient, int(largest_request))

    def _exchange_headers(self, own_header: Sequence[float]) -> list[list[float]]:
        """Return these numbers of all replicas, in the order of their names."""
        sent_header = torch.tensor(own_header, dtype=torch.float64)
        header_rows = sent_header.repeat(self.size, 1)
        self._wait_for_works(
            self._start_exchange(
                _HEADER_TAG, [sent_header] * self.size, list(header_rows)
            )
        )
        headers: list[list[float]] = header_rows.tolist()
        return headers

    def _sum_slices(
        self,
        buckets: Sequence[Bucket],
        pending_works: Sequence[Sequence[dist.Work]],
        factors: list[float],
    ) -> None:
        """Wait for the gradients of this replica's slices, sum them, and exchange the sums."""
        pending_sums: list[dist.Work] = []
        for bucket, bucket_works in zip(buckets, pending_works, strict=True):
            self._wait_for_works(bucket_works)
            slice_sum = weighted_sum(list(bucket.rows), factors, bucket.sent[self.rank])
            pending_sums += self._start_exchange(
                bucket.tag + 1, [slice_sum] * self.size, list(bucket.sent)
            )
        self._wait_for_works(pending_sums)

    def _compare_facts(self, facts_by_replica: list[list[float]]) -> None:
        if facts_by_replica.count(facts_by_replica[0]) < len(facts_by_replica):
            raise StepError(
                f"replicas differ in update, number of batches or number of parameters ({facts_by_replica}), "
                "so their gradients do not belong together. Run the same script with the same settings on all replicas, without "
                "conditions on the batch around step()."
            )

    def _start_exchange(
        self,
        message_tag: int,
        sent_tensors: Sequence[Tensor],
        received_tensors: Sequence[Tensor],
    ) -> list[dist.Work]:
        """Start to send a tensor to each other replica, and to receive one from each."""
        other_ranks = [rank for rank in range(self.size) if rank != self.rank]
        try:
            pending_works = []
            for rank in other_ranks:
                received_tensor = [received_tensors[rank]]
                pending_works.append(
                    self._group.recv(received_tensor, rank, message_tag)
                )
            for rank in other_ranks:
                sent_tensor = [sent_tensors[rank]]
                pending_works.append(self._group.send(sent_tensor, rank, message_tag))
            return pending_works
        except RuntimeError as error:  # the connection to a member is closed already
            raise LostReplicaError(_first_line(error)) from error

    def _wait_for_works(self, pending_works: Sequence[dist.Work]) -> None:
        timeout = timedelta(seconds=self.timeout_s)
        try:
            for work in pending_works:
                work.wait(timeout)
        # torch has no class for lost connections and timeouts
        except RuntimeError as error:
            raise LostReplicaError(_first_line(error)) from error

    def close(self) -> None:
        """Close the connections; replicas that wait for this one get an error at once."""
        # their messages hold the connections open
        self._buckets = []
        self._parameters = []
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
        self._num_elements = sum(self._sizes)
        self._rank = rank
        sum_dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        self.sent = torch.zeros(size, -(-self._num_elements // size), dtype=sum_dtype)
        """The slices of this replica's gradients; after the exchange, those of the mean."""
        self.rows = torch.zeros_like(self.sent)
        """This replica's slice, of the gradients of each replica."""
        self._views = self._split_vector(self.sent.view(-1))

    @torch.no_grad()
    def copy_gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Copy the gradients of this replica into the bucket, with zeros for missing ones.

        Returns: what is sent to each replica, and where its own is received.
        """
        for gradient_view, parameter in zip(self._views, self.parameters, strict=True):
            if parameter.grad is None:
                gradient_view.zero_()
            else:
                gradient_view.copy_(_local_dense_gradient(parameter.grad))
        self.rows[self._rank].copy_(self.sent[self._rank])
        return list(self.sent), list(self.rows)

    @torch.no_grad()
    def write_means(self, has_gradient: Sequence[bool]) -> None:
        """Set the gradients to their mean, where some replica has one."""
        for parameter, mean_gradient, has_one in zip(
            self.parameters, self._views, has_gradient, strict=True
        ):
            if has_one:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                local_tensor(parameter.grad).copy_(mean_gradient)

    def _split_vector(self, flat_gradients: Tensor) -> list[Tensor]:
        """Return the views of a vector that belong to the parameters."""
        split_gradients = torch.split(flat_gradients[: self._num_elements], self._sizes)
        gradient_views = []
        for flat_gradient, shape in zip(split_gradients, self._shapes, strict=True):
            gradient_views.append(flat_gradient.view(shape))
        return gradient_views


def weighted_sum(
    tensors: Sequence[Tensor], factors: Sequence[float], total: Tensor | None = None
) -> Tensor:
    """Return the sum of the parts times their factors, in order, in `out` if given; a part with the factor 0 is not read.

    Equal factors are applied once, to the sum. With different ones the parts are overwritten. `out` may be the first part.
    """
    if total is None:
        total = torch.empty_like(tensors[0])
    else:
        total = total
    used_tensors = [
        (tensor, tensor_factor)
        for tensor, tensor_factor in zip(tensors, factors, strict=True)
        if tensor_factor
    ]
    if not used_tensors:
        return total.zero_()
    (partial_sum, common_factor), *further_tensors = used_tensors
    if any(tensor_factor != common_factor for _, tensor_factor in further_tensors):
        for tensor, tensor_factor in used_tensors:
            tensor.mul_(tensor_factor)
        common_factor = 1.0
    if not further_tensors:
        total.copy_(partial_sum)
    for tensor, _ in further_tensors:
        torch.add(partial_sum, tensor, out=total)
        partial_sum = total
    return total if common_factor == 1.0 else total.mul_(common_factor)


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], gradient_factor: float) -> None:
    """Multiply the gradients of the only replica; the common factor is one."""
    if gradient_factor == 1.0:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(gradient_factor)


def _local_dense_gradient(grad: Tensor) -> Tensor:
    if grad.layout is not torch.strided:
        raise StepError(
            f"a gradient of layout {grad.layout} cannot be exchanged between replicas, which send dense vectors. Create the embedding with "
            "sparse=False."
        )
    return local_tensor(grad.detach())


def _split_into_runs(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield runs of parameters of one dtype of at least `_BUCKET` elements, where there are as many."""
    parameter_run: list[Tensor] = []
    num_elements = 0
    for parameter in parameters:
        if parameter_run and parameter_run[0].dtype != parameter.dtype:
            yield parameter_run
            parameter_run = []
        if not parameter_run:
            num_elements = 0
        parameter_run.append(parameter)
        num_elements += local_tensor(parameter.detach()).numel()
        if num_elements >= _BUCKET_ELEMENTS:
            yield parameter_run
            parameter_run = []
    if parameter_run:
        yield parameter_run


def _first_line(error: BaseException) -> str:
    if str(error):
        return str(error).splitlines()[0][:200]
    return type(error).__name__
