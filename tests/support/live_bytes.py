"""Count of the bytes of live tensors, for devices without an allocator that counts."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Any in this file: the arguments and results of operations.


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made inside and still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.known: dict[int, weakref.ref[Any]] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        input_storages = {
            id(x.untyped_storage())
            for x in tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        }
        for tensor in tree_leaves(returned):
            if (
                isinstance(tensor, Tensor)
                and id(tensor.untyped_storage())
                not in input_storages | self.known.keys()
            ):
                self.add(tensor.untyped_storage())
        return returned

    def add(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()

        def gone(_: object) -> None:
            del self.known[key]
            self.now -= size

        self.known[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)
