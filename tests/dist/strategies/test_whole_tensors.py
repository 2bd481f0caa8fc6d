"""Whole weights of a model that is split and sharded: right, and without torch's warning about gathering in two steps."""

from __future__ import annotations

import logging

import torch
from torch import nn

from hasten import Accelerator
from hasten.config.sections.parallel import ParallelismConfig
from hasten.modules.names import is_dtensor, whole_of
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, seeded
from tests.support.toys import TINY_LM_PLAN


class Kept(logging.Handler):
    """The messages that were logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@ranks(4)
def test_whole_weights_are_gathered_without_a_warning(ctx: ProcessContext) -> None:
    def net() -> nn.Module:
        return TinyLM(vocab=16, width=8, heads=4, depth=2, context=6)

    handler, logger = (
        Kept(),
        logging.getLogger("torch.distributed.tensor._redistribute"),
    )
    logger.addHandler(handler)
    try:
        config = ParallelismConfig(tp_size=2, dp_shard_size=2, tp_plan=TINY_LM_PLAN)
        accelerator = Accelerator(parallelism_config=config)
        model = accelerator.prepare(seeded(net))
        full_state = accelerator.get_state_dict(model)
        expected = seeded(net).state_dict()
        if accelerator.is_main_process:
            assert all(
                torch.equal(full_state[name], value) for name, value in expected.items()
            )
        names = dict(model.named_parameters())
        assert sum(is_dtensor(p) and len(p.placements) == 2 for p in names.values()) > 8
        for name, parameter in names.items():
            assert is_dtensor(parameter)
            assert torch.equal(whole_of(parameter), expected[name]), name
    finally:
        logger.removeHandler(handler)
    assert not handler.messages
