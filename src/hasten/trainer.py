"""`hasten.trainer`: the module name that users write for the extension of the same name."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.extensions.trainer import *  # noqa: F403  # type: ignore[import-not-found, unused-ignore]
else:
    from hasten.extensions.trainer import __all__, __dir__, __getattr__  # noqa: F401
