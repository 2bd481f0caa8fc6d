"""The elastic rendezvous: torch unpickles the state it finds in the store, so only torch's own records may be in it."""

from __future__ import annotations

import base64
import pickle
from datetime import UTC, datetime
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    _NodeDesc,
    _RendezvousState,
)

from hasten.launch.elastic.handler import CheckedBackend, check_state


class RaisesWhenUnpickled:
    """Raises when it is unpickled, which stands for running anything."""

    def __reduce__(self) -> tuple[Any, ...]:  # Any: pickle's protocol
        return exec, ("raise SystemExit('unpickled')",)


def full_state() -> _RendezvousState:
    """A state with every kind of value in it."""
    state, node = _RendezvousState(), _NodeDesc("host", 1, 2)
    state.participants[node] = 0
    state.wait_list.add(node)
    state.redundancy_list.add(node)
    state.last_heartbeats[node] = state.deadline = datetime.now(UTC)
    return state


def test_states_of_torch_pass_and_anything_else_is_refused_unloaded() -> None:
    for protocol in range(3, pickle.HIGHEST_PROTOCOL + 1):
        check_state(pickle.dumps(full_state(), protocol=protocol))
    hidden = full_state()
    hidden.participants["x"] = RaisesWhenUnpickled()  # type: ignore[index, assignment]  # what a stranger would do
    for data in (
        pickle.dumps(RaisesWhenUnpickled()),
        pickle.dumps(hidden),
        pickle.dumps(print),
        b"",
        b"nonsense",
        b"cos\nsystem\n(S'true'\ntR.",
    ):
        with pytest.raises(RendezvousStateError, match="was not written by a launcher"):
            check_state(data)


def test_a_state_that_a_stranger_wrote_into_the_store_never_reaches_torch() -> None:
    store = HashStore()
    backend = CheckedBackend(C10dRendezvousBackend(store, "job"))
    fine = pickle.dumps(full_state())
    set_ = backend.set_state(fine)
    assert set_ is not None
    assert set_[0] == fine
    assert backend.name == "c10d"
    store.set(
        "torch.rendezvous.job",
        base64.b64encode(pickle.dumps(RaisesWhenUnpickled())).decode(),
    )
    with pytest.raises(RendezvousStateError):
        backend.get_state()
    with pytest.raises(RendezvousStateError):
        backend.set_state(fine)  # answers with what is in the store
    stored_state = C10dRendezvousBackend(store, "job").get_state()
    assert stored_state is not None
    with pytest.raises(SystemExit):  # what would have happened
        pickle.loads(stored_state[0])
