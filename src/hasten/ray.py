"""`hasten.ray`: the module name that users write for the extension of the same name."""

from hasten.extensions.ray.in_worker import fit as fit  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.ray.in_worker import report as report  # type: ignore[import-not-found, unused-ignore]
from hasten.extensions.ray.in_worker import resume as resume  # type: ignore[import-not-found, unused-ignore]

__all__ = ["fit", "report", "resume"]
