"""The comparison of ranks as a part of a run."""

from __future__ import annotations

from hasten.accelerator.components import Components
from hasten.comm.process_group import ProcessGroupComm
from hasten.optim.run_part import RunPart


class DivergencePart(RunPart):
    """Start of the comparison."""

    def built(self, run: Components) -> None:
        """Add the comparison to the parts of the run, unless it is off or there is a single process."""
        ctx = run.accelerator.ctx
        trust = run.accelerator.config.trust
        if trust.divergence == "off" or not isinstance(ctx.world, ProcessGroupComm):
            return
        if not run.is_checked("trust.divergence"):
            return
        # a single process needs none of it
        from hasten.extensions.divergence.divergence_check import (
            DivergenceCheck,
            DivergenceCheckSettings,
        )
        from hasten.extensions.divergence.replicas import Replicas  # the same

        settings = DivergenceCheckSettings(trust.divergence_every, trust.divergence)
        replicas = Replicas(run.prepared, run.clock, trust.divergence_ignore)
        run.clock.parts.add(DivergenceCheck(replicas, ctx, ctx.world.store, settings))
