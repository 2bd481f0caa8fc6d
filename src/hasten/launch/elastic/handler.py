"""Torch's elastic rendezvous over hasten's store, with pickled state validated before torch loads it. Imports torch."""

from __future__ import annotations

import errno
import io
import pickle
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final

from torch.distributed import DistError, Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    create_handler,
)

from hasten.errors import LaunchError
from hasten.launch import network
from hasten.launch.base import Meeting
from hasten.runtime.store import join_store, serve_store

# Torch's timeouts suit thousands of machines; these detect a lost machine within seconds.
_DEFAULTS: Final = MappingProxyType(
    {
        "last_call_timeout": "5",
        "keep_alive_interval": "2",
        "keep_alive_max_attempt": "3",
    }
)
_STORE_TIMEOUT_S: Final = 60.0
_STATE: Final = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_STATE_CLASSES: Final = frozenset(
    {
        (_STATE, "_RendezvousState"),
        (_STATE, "_NodeDesc"),
        ("datetime", "datetime"),
        ("datetime", "timedelta"),
        ("datetime", "timezone"),
        ("builtins", "set"),
    }
)


def elastic_handler(meeting: Meeting, local_address: str) -> RendezvousHandler:
    """Return torch's rendezvous handler for a job whose machines may join and leave.

    Raises: LaunchError if the store cannot be served or reached.
    """
    rdzv_options: dict[str, str] = {
        **_DEFAULTS,
        "join_timeout": f"{meeting.join_timeout_s:.0f}",
        **meeting.options,
    }
    rdzv_options.setdefault("is_host", str(_is_store_host(meeting)))
    rdzv_parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"{meeting.address}:{meeting.port}",
        run_id=meeting.run_id,
        min_nodes=meeting.min_machines,
        max_nodes=meeting.max_machines,
        local_addr=local_address,
        **rdzv_options,
    )
    read_timeout = timedelta(
        seconds=float(rdzv_parameters.get("read_timeout", _STORE_TIMEOUT_S))
    )
    store = _tcp_store(
        meeting, bool(rdzv_parameters.get_as_bool("is_host", False)), read_timeout
    )
    return create_handler(
        store,
        CheckedBackend(C10dRendezvousBackend(store, meeting.run_id)),
        rdzv_parameters,
    )


class CheckedBackend(RendezvousBackend):
    """Rendezvous backend that rejects pickled state containing anything other than torch's rendezvous classes."""

    def __init__(self, inner: RendezvousBackend) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        """The name of the wrapped backend."""
        return self._inner.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token.

        Raises: RendezvousStateError for a state that was not written by torch.
        """
        state_and_token = self._inner.get_state()
        if state_and_token is not None:
            check_state(state_and_token[0])
        return state_and_token

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Store `state` if `token` is current, and return the resulting state.

        Raises: as get_state.
        """
        stored_state = self._inner.set_state(state, token)
        if stored_state is not None:
            check_state(stored_state[0])
        return stored_state


def check_state(state: bytes) -> None:
    """Raise unless unpickling `state` creates only rendezvous records.

    Raises: RendezvousStateError if the pickle names any other class.
    """
    try:
        _StateReader(io.BytesIO(state)).load()
    except Exception as error:  # malicious bytes can raise any exception
        raise RendezvousStateError(
            f"the state of the rendezvous in the store was not written by a launcher ({error}), so it was not loaded: another program "
            "uses this job's port. Choose another --main_process_port, and restrict access to it."
        ) from error


class _StateReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # Any: pickle's protocol
        if (module, name) not in _STATE_CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _is_store_host(meeting: Meeting) -> bool:
    if meeting.machine_rank is not None:
        return meeting.machine_rank == 0
    return network.owns_address(meeting.address)


def _tcp_store(meeting: Meeting, is_host: bool, read_timeout: timedelta) -> Store:
    network.check_resolves(meeting.address)
    try:
        if is_host:
            return serve_store(
                meeting.address, meeting.port, read_timeout, alone=meeting.alone
            )
        return join_store(meeting.address, meeting.port, read_timeout)
    except (DistError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"port {meeting.port} on {meeting.address} is already in use, often by a run that is still alive. "
                f"Choose another with --main_process_port."
            ) from error
        if is_host:
            problem_text = "this machine cannot host the rendezvous at"
        else:
            problem_text = "no machine responds at"
        raise LaunchError(
            f"{problem_text} {meeting.address}:{meeting.port} ({str(error).strip().splitlines()[0][:200]}). Start the job on the machine "
            f"that has this address, and check --main_process_ip, --main_process_port and the firewall."
        ) from error
