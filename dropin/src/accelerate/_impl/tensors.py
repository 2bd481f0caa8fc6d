"""Operations on nested tensors, on one process and over all of them."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import update_wrapper, wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from accelerate._impl import ambient
from accelerate._impl.ambient import AMBIENT
from accelerate._impl.environment.variables import parse_flag_from_env
from accelerate._impl.settings.general import TensorInformation
from accelerate._impl.surface.messages import message
from hasten import trees
from hasten.comm import ops
from hasten.errors import MismatchError

# Any in this file: nested containers of whatever the caller has.
_DTYPES = "float double half bfloat16 uint8 int8 int16 int32 int64 bool"
TENSOR_TYPE_TO_INT = {
    getattr(torch, name): number for number, name in enumerate(_DTYPES.split(), 1)
}
TENSOR_INT_TO_DTYPE = {number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()}


class DistributedOperationException(MismatchError):
    """Raised when ranks bring tensors of different shapes."""


class CannotPadNestedTensorWarning(UserWarning):
    """Nested tensors have no common length to pad to."""


def is_torch_tensor(tensor: Any) -> bool:
    return isinstance(tensor, Tensor)


def is_torch_xpu_tensor(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.device.type == "xpu"


def is_tensor_information(tensor_info: Any) -> bool:
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    return (
        isinstance(data, tuple)
        and hasattr(data, "_asdict")
        and hasattr(data, "_fields")
    )


def honor_type(obj: Any, generator: Any) -> Any:
    if is_namedtuple(obj):
        return type(obj)(*list(generator))
    return type(obj)(generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    apply_options: dict[str, Any] = {
        "test_type": test_type,
        "error_on_other_type": error_on_other_type,
        **kwargs,
    }
    if isinstance(data, tuple | list):
        return honor_type(
            data,
            (recursively_apply(func, item, *args, **apply_options) for item in data),
        )
    if isinstance(data, Mapping):
        data_type: Any = type(data)
        return data_type(
            {
                entry_key: recursively_apply(func, entry_value, *args, **apply_options)
                for entry_key, entry_value in data.items()
            }
        )
    if error_on_other_type and not test_type(data):
        raise TypeError(
            message("unsupported_types", type(data), func.__name__, test_type.__name__)
        )
    if test_type(data):
        return func(data, *args, **kwargs)
    return data


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None
) -> Any:
    if isinstance(tensor, torch.nn.Module):
        return tensor.to(device, non_blocking=non_blocking)
    if isinstance(skip_keys, str):
        skip_keys = [skip_keys]
    return trees.to_device(tensor, device, non_blocking, skip_keys or ())


def get_shape(data: Any) -> Any:
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def get_data_structure(data: Any) -> Any:
    return recursively_apply(
        lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data
    )


def initialize_tensors(data_structure: Any) -> Any:
    return recursively_apply(
        lambda info: torch.empty(*info.shape, dtype=info.dtype),
        data_structure,
        test_type=is_tensor_information,
    )


def find_batch_size(data: Any) -> int | None:
    if isinstance(data, tuple | list | Mapping) and len(data) == 0:
        raise ValueError(f"Cannot find the batch size from empty {type(data)}.")
    if isinstance(data, tuple | list):
        return find_batch_size(data[0])
    if isinstance(data, Mapping):
        return find_batch_size(next(iter(data.values())))
    if not isinstance(data, Tensor):
        raise TypeError(
            f"Can only find the batch size of tensors but got {type(data)}."
        )
    return int(data.shape[0])


def ignorant_find_batch_size(data: Any) -> int | None:
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def listify(data: Any) -> Any:
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def find_device(data: Any) -> torch.device | None:
    tensors_in_data = trees.tensors(data)
    if tensors_in_data:
        return tensors_in_data[0].device
    return None


def concatenate(data: Any, dim: int = 0) -> Any:
    first: Any = data[0]
    if len(data) == 1 and not isinstance(first, Tensor):
        return first
    if isinstance(first, tuple | list):
        return honor_type(
            first,
            (
                concatenate([sequence[key_or_index] for sequence in data], dim)
                for key_or_index in range(len(first))
            ),
        )
    if isinstance(first, Mapping):
        return type(first)(
            {
                key: concatenate([sequence[key] for sequence in data], dim)
                for key in first
            }
        )  # type: ignore[call-arg]
    if not isinstance(first, Tensor):
        raise TypeError(f"Can only concatenate tensors but got {type(first)}")
    return torch.cat(data, dim)


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: Any = None, num_processes: Any = None
) -> Any:
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def convert_to_fp32(tensor: Any) -> Any:
    return trees.to_fp32(tensor)


class ConvertOutputsToFp32:
    """A forward whose half-precision outputs become float32."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> dict[str, Any]:
        raise pickle.PicklingError(message("pickled_with_precision"))


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    convert = ConvertOutputsToFp32(model_forward)

    @wraps(convert, assigned=(), updated=())
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert(*args, **kwargs)

    return forward


def pad_input_tensors(
    tensor: Any, batch_size: int, num_processes: int, dim: int = 0
) -> Any:
    """Tensors lengthened with zeros so that processes get equal parts."""

    def pad(unpadded: Tensor) -> Tensor:
        missing = -batch_size % num_processes
        if missing == 0:
            return unpadded
        shape = list(unpadded.shape)
        shape[dim] = missing
        return torch.cat([unpadded, unpadded.new_zeros(shape)], dim=dim)

    pad.__name__ = "_pad_input_tensors"  # in messages
    return recursively_apply(pad, tensor, error_on_other_type=True)


# -- over all processes -----------------------------------------------------------------------------------------------
def _checked_tensor(name: str, data: Any) -> Any:
    """Return the tensors in new containers. Raises: TypeError for other objects among them, in the name of a step."""

    def is_same(tensor: Any) -> Any:
        return tensor

    is_same.__name__ = name
    return recursively_apply(is_same, data, error_on_other_type=True)


def _world_comm() -> Any:
    return ambient.start().world


def verify_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the collective, which in debug mode compares the processes' shapes first."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        # PartialState().debug
        if AMBIENT.partial.get("debug", parse_flag_from_env("ACCELERATE_DEBUG_MODE")):
            shapes = gather_object([get_shape(args[0] if args else kwargs["tensor"])])
            if any(shape != shapes[0] for shape in shapes):
                listed = "\n  - ".join(
                    f"Process {number}: {shape}" for number, shape in enumerate(shapes)
                )
                raise DistributedOperationException(
                    message("shapes_differ", function.__name__, listed)
                )
        return function(*args, **kwargs)

    return run


def chained_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation made of others, whose error about shapes names it."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except MismatchError as error:
            operation_name = f"{run.__module__}.{run.__name__}"
            raise DistributedOperationException(
                message("operation_failed", operation_name)
            ) from error

    return run


@verify_operation
def gather(tensor: Any) -> Any:
    """Return every process's tensors, joined along the first dimension. Ranks: every rank."""
    world = _world_comm()
    if world.size == 1:  # quirk: FLAT_RESULTS
        return tensor
    return _gpu_gather(tensor)


def _gpu_gather(tensor: Any) -> Any:
    _checked_tensor("_gpu_gather_one", tensor)
    return ops.gather(tensor, _world_comm())


def gather_object(object: Any) -> Any:
    """Return every process's list, joined. Ranks: every rank."""
    world = _world_comm()
    if world.size == 1:
        return object
    objects_of_ranks = world.all_gather_object(object)  # quirk: GATHER_OBJECT_JOINS
    return list(chain.from_iterable(objects_of_ranks))


@verify_operation
def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Return the tensors of one process, written into those of the others. Ranks: every rank."""
    if _world_comm().size == 1:
        return tensor
    return _gpu_broadcast(tensor, src=from_process)


def _gpu_broadcast(data: Any, src: int = 0) -> Any:
    tensor = _checked_tensor("_gpu_broadcast_one", data)
    sent = ops.broadcast(tensor, _world_comm(), src)
    with torch.no_grad():
        for local_tensor, received_tensor in zip(
            trees.tensors(tensor), trees.tensors(sent), strict=True
        ):
            local_tensor.copy_(received_tensor)
    return tensor


def broadcast_object_list(object_list: Any, from_process: int = 0) -> Any:
    """Return the list, its items replaced by those of one process. Ranks: every rank."""
    world = _world_comm()
    if world.size == 1:
        return object_list
    return ops.broadcast_object_list(object_list, world, from_process)


@verify_operation
def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Tensors summed or averaged over processes; `scale` acts on TPUs only. Ranks: every rank."""
    copied = recursively_apply(
        torch.clone, _checked_tensor("_reduce_across_processes", tensor)
    )
    world: Any = _world_comm()
    if reduction == "none" or world.size == 1:
        return copied
    # quirk: SCALE_IS_FOR_XLA
    reduced = ops.reduce(copied, world, reduction)  # type: ignore[arg-type]  # checked there
    share = 1 / world.size if reduction == "mean" else 1
    return trees.zip_tensors(
        lambda reduced_tensor, local_tensor: _with_gradient(
            reduced_tensor, local_tensor, share
        ),
        reduced,
        copied,
    )


def _with_gradient(reduced: Tensor, local_tensor: Tensor, share: float) -> Tensor:
    """Return the reduced tensor, through which this process's own part of it gets a gradient."""
    if not local_tensor.requires_grad:
        return reduced
    result = local_tensor * share
    with torch.no_grad():
        return result.copy_(reduced)


@chained_operation
def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
) -> Any:
    """Tensors padded to the largest size any process has along `dim`. Ranks: every rank."""
    tensor = _checked_tensor("_pad_across_processes", tensor)
    if any(leaf.is_nested for leaf in trees.tensors(tensor)):
        warnings.warn(message("nested_not_padded"), CannotPadNestedTensorWarning)
        return tensor
    world = _world_comm()
    if world.size == 1 or all(dim >= leaf.dim() for leaf in trees.tensors(tensor)):
        return tensor
    return ops.pad_across(tensor, world, dim, pad_index, pad_first)


def gather_tensor_shape(tensor: Any) -> Any:
    """Return the shapes of one process's tensor, known to all. Ranks: every rank."""
    return ops.gather_object([list(tensor.shape)], _world_comm())


def copy_tensor_to_devices(tensor: Tensor | None = None) -> Tensor:
    """Return the tensor of the one process that has it on every process; the others pass nothing. Ranks: every rank."""
    world = _world_comm()
    source = world.all_gather_object(tensor is not None).index(True)
    sent: Tensor = world.broadcast_object(
        None if tensor is None else tensor.cpu(), source
    )
    return sent.to(ambient.device())


@contextmanager
def GatheredParameters(  # noqa: N802  the established name
    params: Any, modifier_rank: Any = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """A block in which ZeRO-3 parameters are whole; nothing needs doing without DeepSpeed."""
    yield
