"""Linux kernels on which processes of a job are known to hang."""

from __future__ import annotations

import os
import re
import sys
from typing import Final

from hasten.runtime.logs import get_logger

log = get_logger(__name__)
_LEAST: Final = (5, 5)


def warn_of_old_kernel() -> None:
    """Log a warning, on the main process, if this machine has a Linux kernel before 5.5."""
    version = os.uname().release if sys.platform == "linux" else ""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < _LEAST:
        log.warning(
            "Detected kernel version %s, which is below the recommended minimum of 5.5.0; this can cause the process to "
            "hang. It is recommended to upgrade the kernel to the minimum version or higher.",
            version,
        )
