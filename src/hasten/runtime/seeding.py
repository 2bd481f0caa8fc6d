"""Random generators: seeding, saving and restoring their state without pickle, and synchronising it across ranks."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hasten.comm.base import Comm
from hasten.errors import ConfigError, CorruptCheckpointError, DeviceError
from hasten.optional import need
from hasten.runtime import env
from hasten.runtime.logs import get_logger
from hasten.runtime.topology import Topology

log = get_logger(__name__)

RNG_TYPES: Final = ("python", "numpy", "torch", "device", "generator")
_LARGEST_SEED: Final = 2**63 - 1
_CUBLAS: Final = "CUBLAS_WORKSPACE_CONFIG"


def set_seed(
    seed: int,
    device_specific: bool = False,
    deterministic: bool = False,
    *,
    rank: int | None = None,
) -> int:
    """Seed python, numpy, torch and every device; return the seed used on this rank.

    `device_specific` adds the rank, so that ranks draw different numbers (`rank` defaults to that of the process).
    `deterministic` also makes torch reject operations whose result depends on thread or kernel timing.
    Raises: ConfigError unless `seed` is a whole number from 0 to 2**63 - 1.
    """
    seed = _checked_seed(seed)
    if device_specific:
        seed += _process_rank() if rank is None else rank
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # also seeds every accelerator supported by torch
    # torch does not seed XLA devices; strategy='xla' starts from torch's seed
    if "torch_xla" in sys.modules:
        need("torch_xla").manual_seed(seed)
    if deterministic:
        _make_deterministic()
    return seed


def _checked_seed(seed: object) -> int:
    if (
        not isinstance(seed, bool)
        and isinstance(seed, Integral)
        and 0 <= int(seed) <= _LARGEST_SEED
    ):
        return int(seed)
    if isinstance(seed, Integral) and int(seed) < 0:
        problem_text = "is negative"
    else:
        problem_text = "is no seed"
    raise ConfigError(
        f"seed={seed!r} {problem_text}: not a whole number from 0 to 2**63 - 1, and numpy and torch take no other; choose one, such as 42."
    )


def _make_deterministic() -> None:
    if torch.cuda.is_available() and env.put_default(_CUBLAS, ":4096:8"):
        log.info(
            "set %s=:4096:8, without which cuBLAS refuses to be deterministic", _CUBLAS
        )
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _process_rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return Topology.from_env(env.snapshot()).rank


@dataclass(frozen=True, slots=True)
class RngState:
    """State of every generator of one process: tensors, numbers and strings only, so no pickle is needed.

    The tree is
        {"python": {"version": int, "words": int64[625], "gauss": float | None},
         "numpy":  {"kind": "MT19937", "words": int64[624], "position": int, "has_gauss": int, "gauss": float},
         "torch":  uint8[n],
         "device": {"type": "cuda", "state": uint8[n]} | None}
    """

    tree: Mapping[str, Any]  # Any: tensors and numbers, as listed above

    @classmethod
    def capture(
        cls,
        device: torch.device | str = "cpu",
        host_states: tuple[Tensor, tuple[Any, ...], Mapping[str, Any]] | None = None,
        device_bytes: Tensor | None = None,
    ) -> RngState:
        """Return the current state of all generators; of the devices, only that of `device`, used by this process.

        `host_states` (of torch, python and numpy) and `device_bytes` are states that were read earlier.
        """
        torch_device = torch.device(device)
        if host_states is None:
            numpy_now = np.random.get_state(legacy=False)
            host_states = torch.get_rng_state(), random.getstate(), numpy_now
            if torch_device.type != "cpu":
                device_bytes = device_state(torch_device)
        cpu_bytes, (version, python_words, gauss), numpy_state = host_states
        key_words = np.asarray(numpy_state["state"]["key"]).astype(np.int64)
        device_tree = None
        if device_bytes is not None:
            device_tree = {"type": torch_device.type, "state": device_bytes}
        return cls(
            {
                "python": {
                    "version": version,
                    "words": torch.tensor(python_words, dtype=torch.int64),
                    "gauss": gauss,
                },
                "numpy": {
                    "kind": str(numpy_state["bit_generator"]),
                    "words": torch.from_numpy(key_words),
                    "position": int(numpy_state["state"]["pos"]),
                    "has_gauss": int(numpy_state["has_gauss"]),
                    "gauss": float(numpy_state["gauss"]),
                },
                "torch": cpu_bytes,
                "device": device_tree,
            }
        )

    def restore(
        self,
        device: torch.device | str = "cpu",
        missing: Literal["error", "warn"] = "error",
    ) -> None:
        """Set all generators to this state.

        `missing` selects the behaviour if the state was captured on another kind of device, so that the generator of
        `device` cannot be restored.
        Raises: DeviceError in that case, unless `missing` is "warn".
        """
        torch_device = torch.device(device)
        self.check_device(torch_device, missing)
        python_tree = self.tree["python"]
        numpy_tree = self.tree["numpy"]
        python_words = tuple(python_tree["words"].tolist())
        random.setstate((python_tree["version"], python_words, python_tree["gauss"]))
        np.random.set_state(
            (
                numpy_tree["kind"],
                numpy_tree["words"].numpy().astype(np.uint32),
                numpy_tree["position"],
                numpy_tree["has_gauss"],
                numpy_tree["gauss"],
            )
        )
        torch.set_rng_state(self.tree["torch"])
        device_tree = self.tree["device"]
        if device_tree is not None and device_tree["type"] == torch_device.type:
            _set_device_state(torch_device, device_tree["state"])

    def check_device(
        self, device: torch.device, missing: Literal["error", "warn"] = "error"
    ) -> None:
        """Raise DeviceError, or warn, if the state was captured on another kind of device."""
        device_tree = self.tree["device"]
        saved_type = "cpu" if device_tree is None else device_tree["type"]
        if saved_type == device.type:
            return
        message = (
            f"the random state was captured on {saved_type!r} and this process works on {device.type!r}, so dropout and other "
            f"draws there will differ from the run that was saved"
        )
        if missing == "error":
            raise DeviceError(
                f"{message}. Resume on {saved_type!r}, or accept it by restoring with missing='warn'."
            )
        log.warning("%s.", message)

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> RngState:
        """Return the state in a tree that was saved, after checking it.

        Raises: CorruptCheckpointError if `tree` is not such a state.
        """
        try:
            python_tree = tree["python"]
            numpy_tree = tree["numpy"]
            gauss = python_tree["gauss"]
            device_tree = tree["device"]
            if device_tree is not None:
                device_tree = {
                    "type": str(device_tree["type"]),
                    "state": _checked_vector(device_tree["state"], torch.uint8, None),
                }
            return cls(
                {
                    "python": {
                        "version": int(python_tree["version"]),
                        "words": _checked_vector(
                            python_tree["words"], torch.int64, 625
                        ),
                        "gauss": None if gauss is None else float(gauss),
                    },
                    "numpy": {
                        "kind": str(numpy_tree["kind"]),
                        "words": _checked_vector(numpy_tree["words"], torch.int64, 624),
                        "position": int(numpy_tree["position"]),
                        "has_gauss": int(numpy_tree["has_gauss"]),
                        "gauss": float(numpy_tree["gauss"]),
                    },
                    "torch": _checked_vector(tree["torch"], torch.uint8, None),
                    "device": device_tree,
                }
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptCheckpointError(
                f"the saved random state cannot be read: {type(error).__name__}: {error}. Without it the run would continue with "
                f"other random numbers; use another checkpoint, or load without random states."
            ) from error


def _checked_vector(
    saved_vector: object, dtype: torch.dtype, num_words: int | None
) -> Tensor:
    if (
        not isinstance(saved_vector, Tensor)
        or saved_vector.dtype != dtype
        or saved_vector.dim() != 1
        or num_words not in (None, len(saved_vector))
    ):
        if isinstance(saved_vector, Tensor):
            shown_shape = f"{saved_vector.dtype} of {tuple(saved_vector.shape)}"
        else:
            shown_shape = type(saved_vector).__name__
        raise ValueError(
            f"expected a {dtype} vector{f' of {num_words}' if num_words else ''}, found {shown_shape}"
        )
    return saved_vector.cpu()


def device_state(device: torch.device) -> Tensor | None:
    """Return the state of the device's default generator, as bytes on the CPU; None for the CPU itself."""
    if device.type == "cpu":
        return None
    if device.type == "xla":
        return torch.tensor(
            list(_settled_xla_seed().to_bytes(8, "little")), dtype=torch.uint8
        )
    device_module = torch.get_device_module(device)
    if device.type == "mps":
        generator_state: Tensor = device_module.get_rng_state()
    else:
        generator_state = device_module.get_rng_state(device)
    return generator_state.cpu()


def _settled_xla_seed() -> int:
    """Return the seed of XLA devices as of the boundary between two steps; recorded operations are executed.

    A step starts with a seed, each draw derives another, and the end of the step derives the next step's seed from the first: the seed
    in the middle of a step would give different numbers. If nothing was drawn, the seed is unchanged, so saving changes no later draw.
    """
    xla_model = need("torch_xla.core.xla_model")
    sync = need("torch_xla").sync
    shown_seed = int(xla_model.get_rng_state())
    sync()
    next_seed = int(xla_model.get_rng_state())
    xla_model.set_rng_state(shown_seed)
    sync()
    if int(xla_model.get_rng_state()) == next_seed:
        settled_seed = shown_seed
    else:
        settled_seed = next_seed
    xla_model.set_rng_state(settled_seed)
    return settled_seed


def _set_device_state(device: torch.device, generator_state: Tensor) -> None:
    if device.type == "xla":
        need("torch_xla.core.xla_model").set_rng_state(
            int.from_bytes(bytes(generator_state.tolist()), "little")
        )
        return
    device_module = torch.get_device_module(device)
    if device.type == "mps":
        device_module.set_rng_state(generator_state)
    else:
        device_module.set_rng_state(generator_state, device)


def synchronize_rng_states(
    types: Sequence[str],
    comm: Comm,
    generator: torch.Generator | None = None,
    src: int = 0,
) -> None:
    """Broadcast the generator states of member `src` to every member of `comm`.

    `types` are "python", "numpy", "torch", "device" (or the type of the device), and "generator", which
    refers to the `generator` argument. Ranks: every member.
    Raises: ConfigError for an unknown type, or "generator" without one.
    """
    rng_types = checked_rng_types(types, comm.device)
    if "generator" in rng_types and generator is None:
        raise ConfigError(
            "synchronize_rng_states was asked for 'generator' without a generator, so ranks would shuffle differently; pass "
            "generator=..., or leave 'generator' out."
        )
    rng_state = RngState.capture(comm.device)
    local_states: dict[str, Any] = {}
    for rng_type in rng_types - {"generator"}:
        local_states[rng_type] = rng_state.tree[rng_type]
    if "generator" in rng_types and generator is not None:
        local_states["generator"] = generator.get_state()
    source_states: dict[str, Any] = comm.broadcast_object(local_states, src)
    if generator is not None and "generator" in source_states:
        generator.set_state(source_states.pop("generator"))
    RngState.from_tree({**rng_state.tree, **source_states}).restore(comm.device)


def checked_rng_types(types: Sequence[str], device: torch.device) -> frozenset[str]:
    """Return the kinds of generators that these names mean on a process whose device is `device`.

    Raises: ConfigError for an unknown name.
    """
    return frozenset(_checked_type(rng_type, device) for rng_type in types)


def _checked_type(rng_type: str, device: torch.device) -> str:
    if rng_type in RNG_TYPES:
        return rng_type
    if rng_type == device.type:
        return "device" if rng_type != "cpu" else "torch"
    raise ConfigError(
        f"rng type {rng_type!r} is not known on a process that works on {device.type!r}; use some of {', '.join(RNG_TYPES)}."
    )
