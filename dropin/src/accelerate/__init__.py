"""The established top-level names of Accelerate 1.15, each loaded on first use."""

from accelerate._impl.surface.lazy import lazy
from accelerate._impl.surface.left_out import refuse_other_package

__version__ = "1.15.0"
__implementation__ = "hasten"

refuse_other_package()

__getattr__, __dir__ = lazy(__name__)
__all__ = __getattr__("__all__")  # pyright: ignore[reportUnsupportedDunderAll]
