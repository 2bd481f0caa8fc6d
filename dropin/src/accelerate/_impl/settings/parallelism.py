"""ParallelismConfig: the sizes of the mesh under their established names."""

import json
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, Self

from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

import hasten
from accelerate._impl.settings import general
from accelerate._impl.settings.filled import fill_from_variables
from accelerate._impl.surface.messages import message
from accelerate._impl.surface.shown import shown_property
from hasten.runtime.mesh_plan import MeshSpec

# Any in this file: the Accelerator, which imports this module.
_AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
_HANDLERS = {
    "tp": general.TorchTensorParallelConfig,
    "cp": general.TorchContextParallelConfig,
    "sp": general.DeepSpeedSequenceParallelConfig,
}


@dataclass
class ParallelismConfig:
    """The number of processes of each kind of parallelism."""

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: Literal["torch"] | None = None
    sp_size: int | None = None
    sp_backend: Literal["deepspeed"] | None = None
    tp_handler: general.TorchTensorParallelConfig | None = None
    cp_handler: general.TorchContextParallelConfig | None = None
    sp_handler: general.DeepSpeedSequenceParallelConfig | None = None

    device_mesh: DeviceMesh | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        fill_from_variables(
            self, "PARALLELISM_CONFIG_", **{f"{axis}_size": (int, 1) for axis in _AXES}
        )
        fill_from_variables(
            self,
            "PARALLELISM_CONFIG_",
            cp_backend=(str, "torch"),
            sp_backend=(str, "deepspeed"),
        )
        self._sizes = {
            axis: self._axis_size(axis)
            for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
        }
        self._check_sizes()
        for axis, kind in _HANDLERS.items():
            if self._axis_size(axis) > 1:
                setattr(self, f"{axis}_handler", self._axis_handler(axis, kind))

    def _axis_handler(self, axis: str, kind: type[Any]) -> Any:
        """Return the options of an axis. Raises: ValueError for those of another one."""
        axis_handler = getattr(self, f"{axis}_handler")
        backend = getattr(self, f"{axis}_backend", None)
        if (
            axis_handler is not None
            and backend is not None
            and not isinstance(axis_handler, kind)
        ):
            raise ValueError(
                message(
                    "handler_of_another_backend",
                    axis,
                    backend,
                    kind,
                    type(axis_handler),
                )
            )
        return kind() if axis_handler is None else axis_handler

    @classmethod
    def launched(cls, sizes: hasten.ParallelismConfig, mesh: MeshSpec) -> Self | None:
        """Return what the flags of a launch stand for where they split sequences: scripts look for the group of one."""
        if sizes.sp_size == 1:
            return None
        return cls(
            dp_replicate_size=mesh.dp_replicate,
            dp_shard_size=mesh.dp_shard,
            sp_size=sizes.sp_size,
        )

    def _check_sizes(self) -> None:
        if wrong := [axis for axis in _AXES if getattr(self, f"{axis}_size") < 1]:
            raise ValueError(
                f"{wrong[0]}_size must be at least 1, but got {getattr(self, f'{wrong[0]}_size')}"
            )
        if self.cp_enabled and self.sp_enabled:
            raise ValueError(message("cp_and_sp", self.cp_size, self.sp_size))
        for backend_name, only in (
            ("cp_backend", "torch"),
            ("sp_backend", "deepspeed"),
        ):
            if getattr(self, backend_name) != only:
                raise ValueError(
                    f"{backend_name} must be one of ['{only}'], but got {getattr(self, backend_name)}"
                )
        if (
            (self.tp_enabled or self.cp_enabled)
            and self.dp_replicate_enabled
            and not self.dp_shard_enabled
        ):
            raise ValueError(message("replicas_with_tp_or_cp"))

    def _axis_size(self, *axes: str) -> int:
        return prod(int(getattr(self, f"{axis}_size")) for axis in axes)

    def _set_size(self, parallelism: str, size: int) -> None:
        assert parallelism in self._sizes, (
            f"Parallelism must be one of {self._sizes.keys()}"
        )
        self._sizes[parallelism] = size
        setattr(self, f"{parallelism}_size", size)

    def __repr__(self) -> str:
        field_names = [
            "dp_replicate_size",
            "dp_shard_size",
            "tp_size",
            "cp_size",
            "cp_backend",
            "sp_size",
            "sp_backend",
        ]
        lines = "".join(
            f"\t{field_name}={getattr(self, field_name)},\n"
            for field_name in field_names
        )
        handlers = f"\ttp_handler={self.tp_handler},\n\tcp_handler={self.cp_handler})\n"
        return f"ParallelismConfig(\n {lines}\ttotal_size={self.total_size}\n{handlers}"

    def to_json(self) -> str:
        return json.dumps({f"{axis}_size": self._axis_size(axis) for axis in _AXES})

    total_size = shown_property(
        lambda self: self._axis_size(*_AXES), "Processes in all."
    )
    data_parallel_size = shown_property(
        lambda self: self._axis_size(*_AXES[:2]),
        "Processes that read different samples.",
    )
    non_data_parallel_size = shown_property(
        lambda self: self._axis_size(*_AXES[2:]), "Processes that share samples."
    )

    dp_replicate_enabled = shown_property(
        lambda self: self._axis_size("dp_replicate") > 1,
        "Whether models are replicated.",
    )
    dp_shard_enabled = shown_property(
        lambda self: self._axis_size("dp_shard") > 1, "Whether models are sharded."
    )
    tp_enabled = shown_property(
        lambda self: self._axis_size("tp") > 1, "Whether layers are split."
    )
    cp_enabled = shown_property(
        lambda self: self._axis_size("cp") > 1, "Whether sequences are split."
    )
    sp_enabled = shown_property(
        lambda self: self._axis_size("sp") > 1,
        "Whether sequences are split by DeepSpeed.",
    )

    def _enabled_axes(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self._axis_size(axis) > 1]

    dp_dim_names = shown_property(
        lambda self: self._enabled_axes("dp_replicate", "dp_shard"),
        "Axes of data parallelism.",
    )
    non_dp_dim_names = shown_property(
        lambda self: self._enabled_axes("tp", "cp", "sp"), "The other axes."
    )
    dp_shard_cp_dim_names = shown_property(
        lambda self: self._enabled_axes("dp_shard", "cp"),
        "Axes parameters are sharded over.",
    )
    dp_cp_dim_names = shown_property(
        lambda self: self._enabled_axes("dp_replicate", "dp_shard", "cp"),
        "Axes of gradient averages.",
    )
    fsdp_dim_names = shown_property(
        lambda self: [*self._enabled_axes("dp_replicate"), "dp_shard_cp"],
        "The axes of FSDP's mesh.",
    )
    active_mesh_dims = shown_property(
        lambda self: [*self.dp_dim_names, *self.non_dp_dim_names],
        "Axes of several processes.",
    )

    def _get_mesh(self) -> Any:
        axis_names = self._enabled_axes(*_AXES)
        if axis_names:
            return (tuple(axis_names), tuple(self._sizes[axis] for axis in axis_names))
        return ()

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Torch's mesh of these sizes. Ranks: every rank."""
        if not self._get_mesh():
            return None
        axis_names, sizes = self._get_mesh()
        mesh = device_mesh.init_device_mesh(
            device_type, sizes, mesh_dim_names=axis_names
        )
        joint = {
            "dp": self.dp_dim_names,
            "dp_shard_cp": self.dp_shard_cp_dim_names,
            "dp_cp": self.dp_cp_dim_names,
        }
        for joint_name, axes in joint.items():
            if axes:
                mesh[axes]._flatten(joint_name)
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Torch's mesh of these sizes, made on first use. Ranks: every rank."""
        if self.device_mesh is None:
            if device_type is None:
                raise ValueError(
                    "You need to pass a device_type e.g cuda to build the device mesh"
                )
            self.device_mesh = self.build_device_mesh(device_type)
        elif device_type not in (None, mesh_type := self.device_mesh.device_type):
            raise ValueError(message("mesh_of_another_device", mesh_type, device_type))
        return self.device_mesh

    def _validate_accelerator(self, accelerator: Any) -> None:
        if self.total_size == 1:
            if not accelerator.multi_device:
                return
            self._set_size("dp_replicate", accelerator.num_processes)
        if self.total_size != accelerator.num_processes and not self.sp_enabled:
            raise ValueError(
                message(
                    "total_size_differs", self.total_size, accelerator.num_processes
                )
            )
        if accelerator.is_fsdp2 and not self.dp_shard_cp_dim_names:
            raise ValueError(message("nothing_to_shard_over"))
        kinds = ("MULTI_CPU", "DEEPSPEED")  # the original refuses CPU processes
        if not (
            accelerator.is_fsdp2
            or accelerator.multi_device
            or accelerator.distributed_type in kinds
        ):
            raise ValueError(
                message("sizes_of_another_kind", accelerator.distributed_type)
            )

    def to_hasten(self) -> hasten.ParallelismConfig:
        """Return the same in hasten's terms; sizes of 1 are left to be filled, and experts to a client's patch."""
        sizes: dict[str, Any] = {}
        for axis in self._enabled_axes(*_AXES):
            sizes[f"{axis}_size"] = self._axis_size(axis)
        return hasten.ParallelismConfig(**sizes, ep_size=1)
