"""Messages between the pool and its workers: jobs and reports."""

from __future__ import annotations

import importlib
import importlib.machinery
import io
import signal
import struct
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Literal

import cloudpickle

from hasten.errors import ConfigError

# Messages between the pool and the process that forks its workers: a verb and a number; FORK also has a descriptor,
# and LOAD is followed by the name of a module, of that many bytes.
CONTROL_MESSAGE: Final = struct.Struct("!ci")
READY_VERB: Final = b"r"
FORK_VERB: Final = b"f"
WAIT_VERB: Final = b"w"
LOAD_VERB: Final = b"l"

STACK_SIGNAL: Final = int(getattr(signal, "SIGRTMIN", signal.SIGUSR2)) + (
    5 if hasattr(signal, "SIGRTMIN") else 0
)
"""Signal that requests the stacks of a worker's threads. Real-time if possible, as tested code may use the ordinary ones."""


@dataclass(frozen=True, slots=True)
class PoolJob:
    """One call on one rank."""

    payload: bytes
    """The function, its arguments and the caller's warning filters, pickled by value if needed."""
    rank: int
    world_size: int
    folder: str
    """Folder shared by the ranks of this job: the store, and their output."""
    timeout_s: float
    mesh: Mapping[str, int]
    device: str
    env: Mapping[str, str]
    path: tuple[str, ...]
    cwd: str

    @property
    def store(self) -> str:
        """The file store of the process group."""
        return f"{self.folder}/store"

    @property
    def output(self) -> str:
        """The file with the output of this rank."""
        return f"{self.folder}/output-{self.rank}"

    @property
    def stack(self) -> str:
        """The file to which this rank writes its stacks on request."""
        return f"{self.folder}/stack-{self.rank}"


@dataclass(frozen=True, slots=True)
class PoolReport:
    """Result of the call on a rank that survived it."""

    returned: bool
    value: bytes | None = None
    """The result, or the exception, pickled; None for an exception that cannot be pickled."""
    traceback: str = ""
    skipped: str | None = None
    """The reason, if the function called pytest.skip."""


RankStatus = Literal["returned", "raised", "died", "hung", "interrupted"]


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """Result of the call on one rank, as seen by the caller."""

    rank: int
    status: RankStatus
    value: Any = None  # Any: return value of the function
    error: BaseException | None = None
    details: str = ""
    """The traceback of a rank that raised, the stacks of one that was stopped, or the exit status of one that died."""
    output: str = ""
    skipped: str | None = None
    """The reason, if the function called pytest.skip."""
    first: bool = False
    """True if this rank failed before the others, so that its failure is likely the cause of theirs."""


def pack_call(fn: Callable[..., object], args: tuple[object, ...]) -> bytes:
    """Return the call as bytes that another process can run, even if it cannot import the function's module.

    Raises: ConfigError naming the argument that cannot be pickled.
    """
    warning_filters = []
    for warning_filter in warnings.filters:
        if warning_filter[2].__module__ != "__main__":
            warning_filters.append(warning_filter)
    try:
        with _pickle_module_by_value(fn):
            buffer = io.BytesIO()
            _Pickler(buffer).dump((fn, args, warning_filters))
            return buffer.getvalue()
    except Exception as error:  # pickling runs the __reduce__ of arbitrary objects
        raise ConfigError(
            f"{_name_of(fn)} cannot be sent to the workers: {_describe_culprit(fn, args)} ({error}). They are other processes: pass values, "
            f"and make locks, files, mocks and patches inside the function."
        ) from error


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    """Pickler that sends every imported module by name, even modules of unknown classes (such as torch.ops)."""

    def reducer_override(self, pickled_object: Any) -> Any:  # Any: pickle's protocol
        if (
            isinstance(pickled_object, ModuleType)
            and type(pickled_object) is not ModuleType
            and sys.modules.get(pickled_object.__name__) is pickled_object
        ):
            return importlib.import_module, (pickled_object.__name__,)
        return super().reducer_override(pickled_object)


def _describe_culprit(fn: Callable[..., object], args: tuple[object, ...]) -> str:
    for position, argument in enumerate(args):
        try:
            cloudpickle.dumps(argument)
        except Exception:  # pickling runs the __reduce__ of arbitrary objects
            return f"argument {position} after the context, a {type(argument).__name__}, cannot be pickled"
    return "something that it refers to cannot be pickled"


def _name_of(fn: Callable[..., object]) -> str:
    return str(getattr(fn, "__qualname__", repr(fn)))


@contextmanager
def _pickle_module_by_value(fn: Callable[..., object]) -> Iterator[None]:
    """Context manager in which the module of `fn` is pickled by value if workers could not import it."""
    target = fn
    while hasattr(target, "func"):  # functools.partial
        target = target.func
    module = sys.modules.get(str(getattr(target, "__module__", None)))
    if (
        module is None
        or module.__name__ in cloudpickle.list_registry_pickle_by_value()
        or _is_importable(module.__name__)
    ):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _is_importable(name: str) -> bool:
    """Return whether a fresh process would import the same module under this name.

    Test modules never are: pytest loads them with rewritten asserts and, with importmode=importlib, under special names.
    """
    module = sys.modules[name]
    if name == "__main__" or type(module.__loader__).__module__.startswith("_pytest"):
        return False
    search_path: list[str] | None = None
    module_spec = None
    packages = name.split(".")
    for num_packages in range(1, len(packages) + 1):
        module_spec = importlib.machinery.PathFinder.find_spec(
            ".".join(packages[:num_packages]), search_path
        )
        if module_spec is None:
            break
        search_path = list(module_spec.submodule_search_locations or ())
    if module_spec is not None:
        return module_spec.origin == getattr(module, "__file__", None)
    return name in sys.builtin_module_names or _is_editable(module)


def _is_editable(module: object) -> bool:
    """Return whether an import hook of an editable install found the module."""
    return "editable" in type(getattr(module, "__loader__", None)).__module__
