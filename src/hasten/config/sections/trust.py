"""Settings of the checks of a run: stalls, diverging ranks, losses and gradients."""

from typing import Literal

from hasten.config.base import Section, SectionNames, setting, settings


@settings
class TrustSettings(Section):
    """Checks of a run: ranks that wait without progress, replicas that differ, losses that are not finite.

    A word in place of this class sets `stall`, `divergence` and `numbers` alike: `Accelerator(trust="off")` or `trust="report"`.
    """

    section_names = SectionNames(
        argument="trust", word_fields=("stall", "divergence", "numbers")
    )

    stall: Literal["abort", "report", "off"] = setting(
        "abort",
        "what to do when ranks wait for each other without progress: report it and end the job, only report it, or nothing",
    )
    stall_after_s: float | None = setting(
        None,
        "seconds a rank may wait for the others before it is reported (default: by the longest wait so far, 60 to 600)",
        minimum=0.5,
    )
    divergence: Literal["stop", "report", "off"] = setting(
        "stop",
        "what to do when ranks that must hold the same weights and state do not: stop all, only report, or no check",
    )
    divergence_every: int = setting(
        100,
        "updates between two comparisons of the ranks' weights and state",
        minimum=1,
    )
    divergence_ignore: tuple[str, ...] = setting(
        (),
        "patterns of names of parameters and buffers that differ between ranks on purpose",
    )
    numbers: Literal["report", "stop", "skip", "off"] = setting(
        "report",
        "what happens when a loss is nan or inf: report it; stop all ranks, or skip the update on all ranks "
        "(these two look at gradients as well, before each update); or nothing",
    )
    numbers_spike: float | None = setting(
        None, "also act on a loss above this multiple of the recent median", minimum=1
    )
