"""The watch over stalls as a part of a run."""

from __future__ import annotations

import weakref

from hasten.accelerator.components import Components
from hasten.accelerator.setup import reports_in
from hasten.comm.process_group import ProcessGroupComm
from hasten.optim.run_part import RunPart


class StallWatch(RunPart):
    """Start of the watchdog of a rank, which ends with its Accelerator."""

    def built(self, run: Components) -> None:
        """Start the watchdog, unless it is off or there is a single process. Ranks: every rank."""
        config = run.accelerator.config
        ctx = run.accelerator.ctx
        if config.trust.stall == "off" or not isinstance(ctx.world, ProcessGroupComm):
            return
        if not run.is_checked("trust.stall"):
            return
        # the watchdog's thread must not keep the Accelerator alive
        clocks = weakref.ref(run.clock)

        def count_updates() -> int:
            clock = clocks()
            return 0 if clock is None else clock.num_updates

        def note_stall(seconds: float, over: bool) -> None:
            if (clock := clocks()) is not None:
                for tell in clock.parts.stalled:
                    tell(seconds, over)

        # a single process needs none of it
        from hasten.extensions.watch import watchdog

        timeout = config.process_group.timeout
        timeout_s = watchdog.WatchSettings().timeout_s
        if timeout is not None:
            timeout_s = timeout.total_seconds()
        settings = watchdog.WatchSettings(
            after_s=config.trust.stall_after_s,
            reaction=config.trust.stall,
            timeout_s=timeout_s,
            folder=reports_in(config, "stalls"),
            notify_stall=note_stall,
        )
        watchdog.start_watchdog(
            run.accelerator, watchdog=watchdog.watchdog_of(ctx, count_updates, settings)
        )
