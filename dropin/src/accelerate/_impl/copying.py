"""Copies of prepared objects: they share the run's clock and precision, which belong to an Accelerator."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, ClassVar

# Any in this file: attributes of every type.


class Copyable:
    """Can be pickled and deep-copied, without what belongs to the run."""

    belongs_to_run: ClassVar[tuple[str, ...]] = ()
    """Attributes that copies share and files do not hold."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        shared = {}
        for attribute_name in self.belongs_to_run:
            if attribute_name in self.__dict__:
                shared[attribute_name] = self.__dict__[attribute_name]
        deep_copy = memo[id(self)] = type(self).__new__(type(self))
        deep_copy.__dict__.update(
            {
                attribute_name: deepcopy(attribute_value, memo)
                for attribute_name, attribute_value in self.__getstate__().items()
            }
        )
        deep_copy.__dict__.update(shared)
        deep_copy.rejoin()
        return deep_copy

    def __getstate__(self) -> dict[str, Any]:
        copied_state = {}
        for attribute_name, attribute_value in self.__dict__.items():
            if attribute_name not in self.belongs_to_run:
                copied_state[attribute_name] = attribute_value
        return copied_state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.rejoin()

    def rejoin(self) -> None:
        """Take part in the run that is going on now."""
