"""`strategy="counted"`: hasten's own strategy for the other settings, which also tells the number of parameters."""

import logging
from typing import Any

from hasten.extending import (
    Config,
    OfferedStrategy,
    ProcessContext,
    Strategy,
    choose_strategy,
)

log = logging.getLogger(__name__)


class Counted:
    """Wrapper of a strategy; what it does not define is the wrapped strategy's."""

    name = "counted"

    def __init__(self, inner: Strategy) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:  # Any: methods of the wrapped strategy
        return getattr(self._inner, name)

    def prepare(
        self, bundle: Any, ctx: ProcessContext, precision: Any, train: bool = True
    ) -> None:
        """Prepare models and optimizers, and log how many parameters this process holds. Ranks: every rank."""
        self._inner.prepare(bundle, ctx, precision, train)
        for item in bundle.of("model"):
            log.warning(
                "rank %d holds %d parameters",
                ctx.rank,
                sum(p.numel() for p in item.value.parameters()),
            )


def create(config: Config, ctx: ProcessContext) -> Any:
    """Return the strategy of a run."""
    return Counted(choose_strategy(config.replace(strategy="auto"), ctx))


STRATEGY = OfferedStrategy(create=create)
