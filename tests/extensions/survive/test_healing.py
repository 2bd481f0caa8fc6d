"""Healing between replicas: a state arrives as it was sent, from a source that is there and has the job's token."""

from __future__ import annotations

import threading

import pytest
import torch

from hasten.errors import HastenError
from hasten.extensions.survive import healing
from hasten.extensions.survive.healing import HealingPort, NotHealedError


def test_a_state_arrives_as_it_was_sent() -> None:
    source, port = (HealingPort("127.0.0.1", b"token") for _ in range(2))
    weights = torch.arange(300_000.0)
    state = {"weights": weights, "step": 5, "names": ["a"]}
    content = healing.pack_state(state)
    thread = threading.Thread(
        target=healing.send_state, args=(content, port.address, b"token", "7", 5.0)
    )
    thread.start()
    received = port.receive(source.address, "7", 5.0, 5.0)
    thread.join()
    assert torch.equal(received["weights"], weights)
    assert (received["step"], received["names"]) == (5, ["a"])
    source.close()
    port.close()


def test_a_source_that_ends_is_noticed_while_waiting_for_it() -> None:
    source, port = (HealingPort("127.0.0.1", None) for _ in range(2))
    threading.Timer(0.3, source.close).start()
    with pytest.raises(
        NotHealedError, match=r"closed its connection|cannot be reached"
    ):
        port.receive(source.address, "7", 20.0, 1.0)
    with pytest.raises(NotHealedError, match="cannot be reached"):
        port.receive(source.address, "7", 20.0, 1.0)
    port.close()


def test_a_sender_without_the_token_is_not_heard() -> None:
    source, port = (HealingPort("127.0.0.1", b"token") for _ in range(2))
    content = healing.pack_state({"step": 1})
    timer = threading.Timer(0.1, _send_wrongly, (content, port.address))
    timer.start()
    with pytest.raises(NotHealedError, match="sent nothing"):
        port.receive(source.address, "7", 1.0, 1.0)
    timer.join()
    source.close()
    port.close()


def test_a_state_of_an_earlier_quorum_is_refused() -> None:
    source, port = (HealingPort("127.0.0.1", b"token") for _ in range(2))
    old, new = (healing.pack_state({"step": step}) for step in (1, 2))
    with pytest.raises(TimeoutError):
        # the receiver is not there yet: the bytes wait at its port
        healing.send_state(old, port.address, b"token", "6", 0.2)
    thread = threading.Thread(
        target=healing.send_state, args=(new, port.address, b"token", "7", 20.0)
    )
    thread.start()
    assert port.receive(source.address, "7", 20.0, 5.0)["step"] == 2
    thread.join()
    source.close()
    port.close()


def _send_wrongly(content: bytes, address: str) -> None:
    with pytest.raises(ConnectionError):
        healing.send_state(content, address, b"another", "7", 1.0)


def test_a_state_that_would_run_code_is_not_sent() -> None:
    with pytest.raises(HastenError, match="cannot be sent to another replica safely"):
        healing.pack_state({"thing": threading.Thread})
