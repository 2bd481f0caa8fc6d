"""What the extension offers: a strategy, which TPUs select, and launches on TPU VMs."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="xla",
    summary="torch_xla: TPUs",
    settings={"xla": "hasten.extensions.xla.settings:XLAConfig"},
    public_names={"XLAConfig": "hasten.extensions.xla.settings:XLAConfig"},
    strategies={"xla": "hasten.extensions.xla.strategy:STRATEGY"},
    launch_targets={"xla": "hasten.extensions.xla.launch_target:TARGET"},
    strategy_packages={"xla": "torch_xla"},
    strategy_variables={"xla": "PJRT_DEVICE=TPU"},
)
