"""Methods of the established Accelerator that ask for this process among the others."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from accelerate._impl.views.state import PartialState

if TYPE_CHECKING:
    import hasten

    Base = hasten.Accelerator
else:
    Base = object

# Any in this file: the user's functions and inputs.


class ProcessFace(Base):
    """Decorators and blocks that PartialState has too."""

    def on_main_process(self, function: Any = None) -> Any:
        """The function, run on the main process only."""
        return PartialState().on_main_process(function)

    def on_local_main_process(self, function: Any = None) -> Any:
        """The function, run on each node's main process only."""
        return PartialState().on_local_main_process(function)

    def on_process(self, function: Any = None, process_index: Any = None) -> Any:
        """The function, run on one process only."""
        return PartialState().on_process(function, process_index)

    def on_local_process(self, function: Any = None, local_process_index: Any = None) -> Any:
        """The function, run on one process of each node."""
        return PartialState().on_local_process(function, local_process_index)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """This process's share."""
        return PartialState().split_between_processes(inputs, apply_padding)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on the main process, then on the others."""
        return PartialState().main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on each node's main process, then on the others."""
        return PartialState().local_main_process_first()
