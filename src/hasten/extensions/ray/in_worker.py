"""Metrics, checkpoints and errors of runs on Ray Train; the package `ray` is imported when a function is called.

Inside the training loop of a `ray.train.torch.TorchTrainer` an `Accelerator()` needs no settings: rank, device and process group
are Ray's. The functions here connect the state of such a run with `ray.train.report` and `ray.train.get_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hasten.errors import CheckpointError, LaunchError, PeerFailedError
from hasten.extensions.ray.launch_target import VERSIONS, failures_of, lost_words
from hasten.optional import need
from hasten.tracking.values import snapshot_value

if TYPE_CHECKING:
    from hasten.accelerator.facade import Accelerator

__all__ = ["fit", "report", "resume"]

_SCHEMES: Final = (("s3", "s3"), ("gcs", "gs"), ("abfs", "abfs"), ("hdfs", "hdfs"))
"""Type names of pyarrow's file systems and the URL schemes of the same stores in fsspec."""


def report(
    accelerator: Accelerator, metrics: Mapping[str, Any], *, save: bool = False
) -> str | None:
    """Report metrics to Ray, with `save` together with a new checkpoint of the run; return the checkpoint's path.

    The checkpoint is written by `accelerator.save_state` to Ray's storage, and is complete when Ray receives its path. Ray keeps
    the metrics of rank 0, and deletes old checkpoints by its `CheckpointConfig`. Values may be numbers, strings or tensors of one element.

    Ranks: every rank; `ray.train.report` waits for all of them.
    Raises: LaunchError outside of a Ray Train worker; CheckpointError if the checkpoint cannot be written.
    """
    train, storage = _train_and_storage("hasten.ray.report")
    # Any: numbers, strings and tensors, as Accelerator.log takes them
    reported_metrics = {}
    for checkpoint_name, value in metrics.items():
        reported_metrics[checkpoint_name] = _plain_metric(checkpoint_name, value)
    if not save:
        train.report(reported_metrics)
        return None
    # A name of the time differs after a restart, so that files of an unreported checkpoint are not mixed with new ones.
    checkpoint_name = accelerator.broadcast_object_list(
        [storage.make_default_checkpoint_dir_name()]
    )[0]
    checkpoint_path = storage.build_checkpoint_path_from_name(checkpoint_name)
    saved_path = accelerator.save_state(
        fsspec_location(storage.storage_filesystem, checkpoint_path)
    )
    accelerator.wait_for_saves()
    checkpoint = train.Checkpoint(
        checkpoint_path, filesystem=storage.storage_filesystem
    )
    train.report(
        reported_metrics,
        checkpoint=checkpoint,
        checkpoint_dir_name=checkpoint_name,
        checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD,
    )
    return saved_path


def resume(accelerator: Accelerator) -> bool:
    """Load the newest checkpoint that this run has reported, or that its trainer was given; return whether there was one.

    Call it after `prepare()`. The checkpoint may come from another number of workers.

    Ranks: every rank.
    Raises: LaunchError outside of a Ray Train worker; CheckpointError if the checkpoint cannot be read.
    """
    train, _ = _train_and_storage("hasten.ray.resume")
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return False
    accelerator.load_state(fsspec_location(checkpoint.filesystem, checkpoint.path))
    return True


# Any: a ray.train.torch.TorchTrainer and its ray.train.Result; ray is optional
def fit(trainer: Any) -> Any:
    """Return `trainer.fit()`; if a worker's actor died, raise an error that names its rank instead of Ray's list of errors.

    Raises: PeerFailedError for a lost rank; otherwise the errors of `trainer.fit()`.
    """
    train = need("ray.train", VERSIONS, "hasten.ray.fit")
    try:
        return trainer.fit()
    except train.TrainingFailedError as error:
        lost_workers = [failure for failure in failures_of(error) if failure.lost]
        if not lost_workers:
            raise
        raise PeerFailedError(lost_words(lost_workers)) from error


# Any: a pyarrow.fs.FileSystem, which comes with ray
def fsspec_location(filesystem: Any, path: str) -> str:
    """Return the path or URL under which hasten finds `path` of a file system of pyarrow.

    Raises: CheckpointError for a file system without an equivalent in fsspec.
    """
    filesystem_type = str(filesystem.type_name)
    if filesystem_type == "local":
        return str(Path(path))
    url_scheme = dict(_SCHEMES).get(filesystem_type)
    if filesystem_type.startswith("py::fsspec+"):
        url_scheme = filesystem_type.removeprefix("py::fsspec+")
    if url_scheme is None:
        raise CheckpointError(
            f"Ray stores this run in a file system of type {filesystem_type!r} (path {path!r}), which hasten cannot open, so that no checkpoint "
            "can be written there. Choose a storage_path on a shared folder, in S3, Google Cloud Storage or Azure, or report a "
            "custom checkpoint with ray.train.report."
        )
    return f"{url_scheme}://{path}"


def _plain_metric(name: str, value: Any) -> bool | int | float | str:
    logged_value = snapshot_value(name, value)
    if isinstance(logged_value, bool | int | float | str):
        return logged_value
    number: bool | int | float = logged_value.tensor.item()
    return number


# Any: the module ray.train and its storage context
def _train_and_storage(caller: str) -> tuple[Any, Any]:
    """Return `ray.train` and the storage of the run to which this process belongs.

    Raises: LaunchError outside of a Ray Train worker.
    """
    train = need("ray.train", VERSIONS, caller)
    try:
        return train, train.get_context().get_storage()
    except (RuntimeError, AttributeError) as error:
        raise LaunchError(
            f"{caller} was called in a process that is no worker of Ray Train, so that there is no run to report to. Call it in the loop of a "
            "ray.train.torch.TorchTrainer, or start the script with `hasten launch --ray`."
        ) from error
