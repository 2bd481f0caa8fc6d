"""Exchange of gradients that starts while backward runs, bucket by bucket."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Final

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hasten.survive.exchange import Bucket, LostReplicaError, ReplicaGroup

log = logging.getLogger(__name__)

_PAUSE: Final = 100
"""Updates without early sending after one whose gradients were changed after backward and had to be sent again."""


class EarlySender:
    """Hooks on the parameters that send a bucket when backward has computed its last gradient."""

    def __init__(
        self,
        group: Callable[[], ReplicaGroup | None],
        window: Callable[[], Hashable],
        boundary: Callable[[], bool],
    ) -> None:
        """`group` returns the group of the update that is being computed, None while its members are not known."""
        self._group = group
        self._window = window
        self._boundary = boundary
        self._buckets: list[Bucket] = []
        self._handles: list[RemovableHandle] = []
        self._current: Hashable = None
        self._missing: list[int] = []
        self._pause = 0

    def watch(self, group: ReplicaGroup, parameters: Sequence[Tensor]) -> None:
        """Send the gradients of these parameters early from the next update on; called after each update."""
        self._pause = _PAUSE if group.resent else max(0, self._pause - 1)
        buckets = group.buckets(parameters)
        if buckets is self._buckets:
            return
        self.close()
        if any(parameter.device.type != "cpu" for parameter in parameters):
            return  # a copy to host memory inside backward would make it wait for the device
        self._buckets = buckets
        for number, bucket in enumerate(buckets):
            for parameter in bucket.parameters:
                hook = partial(self._computed, number)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch leaves it untyped
                self._handles.append(handle)

    def _computed(self, number: int, parameter: Tensor) -> None:
        """Count a gradient, and send the buckets that are complete."""
        if self._pause or not self._boundary():
            return
        window = self._window()
        if window != self._current:
            self._current = window
            self._missing = [len(bucket.parameters) for bucket in self._buckets]
        self._missing[number] -= 1
        if self._missing[number] or (group := self._group()) is None:
            return
        try:
            for bucket, missing in zip(self._buckets, self._missing, strict=True):
                if bucket.works is None and not missing:
                    group.send(bucket, window)
        except LostReplicaError as error:  # the exchange after backward meets it again, and handles it
            log.debug("survive: a bucket could not be sent early: %s", error)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._buckets, self._current = [], [], None
