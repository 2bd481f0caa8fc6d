"""The established top-level names of Accelerate 1.15, each loaded on first use."""

from accelerate._impl.surface.conflict import refuse_other_package
from accelerate._impl.surface.lazy import lazy

__version__ = "1.15.0+hasten"

refuse_other_package()

__getattr__, __dir__ = lazy(__name__)
__all__ = __getattr__("__all__")  # pyright: ignore[reportUnsupportedDunderAll]
