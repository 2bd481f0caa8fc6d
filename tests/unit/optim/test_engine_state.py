"""Loaded values of an engine's optimizer lie where its kernels look for them."""

from __future__ import annotations

import pytest
import torch

from hasten.optim.engine import put_where_used

META = torch.device("meta")


@pytest.mark.parametrize(
    ("options", "kind"),
    [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")],
)
def test_step_counts_are_on_the_host_but_for_kernels_that_read_them_on_the_device(
    options: dict[str, bool], kind: str
) -> None:
    assert put_where_used("step", torch.tensor(3.0), options, META).device.type == kind
    assert (
        put_where_used("exp_avg_sq_row", torch.ones(3), options, META).device.type
        == "meta"
    )


def test_a_loaded_value_is_a_copy_and_numbers_stay_numbers() -> None:
    stored = torch.ones(2)
    put_where_used("row", stored, {}, stored.device).zero_()
    assert stored.tolist() == [1.0, 1.0]
    assert put_where_used("step", 4, {"fused": True}, META) == 4
