"""Error classes of hasten, and its warning category.

    HastenError
    ├── ConfigError (ValueError)          a setting is wrong, unknown or contradicts another
    │   ├── UnknownSettingError           no setting has this name
    │   ├── SettingValueError             the value has the wrong type or lies outside its range
    │   ├── ContradictionError            two settings cannot both hold
    │   └── ConfigFileError               a settings file cannot be found, parsed or understood
    ├── ArgumentError (TypeError, ValueError)   a method got an argument of the wrong kind
    ├── MissingPackageError (ImportError) an optional package is absent or too old
    ├── ExtensionError                    an extension is absent, broken, or provides a name that another provides
    ├── TopologyError                     the environment describes an impossible set of processes
    ├── LaunchError                       processes could not be started or ended badly
    ├── CommError                         a collective cannot be carried out
    │   ├── MismatchError                 ranks disagree on the operation, structure, shape or dtype
    │   ├── MissingRanksError             some ranks never arrived
    │   ├── PeerFailedError               another rank raised
    │   └── StallError                    a collective could not complete: some ranks never joined it
    ├── DeviceError (RuntimeError)        the device is absent or cannot do what was asked
    ├── PrepareError (ValueError)         an object cannot be prepared as given
    ├── PrecisionError (ValueError)       a precision the device or model cannot run
    ├── StepError (RuntimeError)          backward, step or clip used in an order that has no meaning
    │   └── LossScaleError                fp16 updates were skipped again and again
    ├── DivergenceError                   ranks that must hold the same values do not
    ├── NumbersError                      a loss or gradient is nan, inf or far too large
    ├── DataError                         a loader, sampler or stream is wrong or inconsistent over ranks
    ├── CheckpointError                   a checkpoint cannot be written or read
    │   ├── IncompleteCheckpointError     never committed, or a file is missing
    │   ├── CorruptCheckpointError        size, checksum, structure or shape is not what was written
    │   ├── OtherModelError (RuntimeError)  names, shapes or dtypes are not those of the model
    │   ├── UnsafeCheckpointError         reading it would run code or leave its folder
    │   ├── CheckpointBusyError           another process keeps the folder locked
    │   ├── CheckpointReplacedError       other saves replaced it again and again while it was read
    │   ├── CheckpointVersionError        written by a version this one cannot read
    │   ├── LoaderStateError (DataError)  a loader's state is damaged
    │   └── HookError                     a hook of save_state or load_state raised
    ├── HubError                          an upload to the Hub, or a download from it, failed
    ├── RanksFailedError                  a function run in the pool of test workers failed on some ranks
    └── TrackerError                      an experiment tracker is unknown or cannot start

A message has three parts: what happened with the values, why it matters, what to do.
"""

import re
from typing import Final

_DOUBLED: Final = re.compile(r"(?<=[^\s./])([.!?])\s*\.(?=\s|$)")
_ON_ITS_OWN_LINE: Final = re.compile(r"\s*\n\s*\.(?=\s|$)")
_BEFORE_SEMICOLON: Final = re.compile(r"(?<=[^\s./])\.;(?=\s)")


def ended_once(message: str) -> str:
    """Return the message without the doubled full stops that embedded sentences cause."""
    message = _ON_ITS_OWN_LINE.sub(".", message)
    return _BEFORE_SEMICOLON.sub(";", _DOUBLED.sub(r"\1", message))


class HastenError(Exception):
    """Base class of all errors that hasten raises deliberately."""

    agreed: bool = False
    """True if every rank of the group raises this error at the same point, so that no rank waits for another."""

    def __init__(self, *args: object) -> None:
        super().__init__(
            *(ended_once(arg) if isinstance(arg, str) else arg for arg in args)
        )


class HastenWarning(UserWarning):
    """Category of all warnings that hasten issues."""

    def __init__(self, *args: object) -> None:
        super().__init__(
            *(ended_once(arg) if isinstance(arg, str) else arg for arg in args)
        )


class ConfigError(HastenError, ValueError):
    """Error for a setting that is wrong, unknown or contradicts another.

    If several errors were found at once, `problems` holds them.
    """

    def __init__(
        self, message: str = "", problems: "tuple[ConfigError, ...]" = ()
    ) -> None:
        super().__init__(message)
        self.problems = problems


class UnknownSettingError(ConfigError):
    """Error for the name of a setting that does not exist."""


class SettingValueError(ConfigError):
    """Error for a setting whose value has the wrong type or is out of range."""


class ContradictionError(ConfigError):
    """Error for two settings that contradict each other."""


class ConfigFileError(ConfigError):
    """Error for a settings file that cannot be found, parsed or understood."""


class ArgumentError(HastenError, TypeError, ValueError):
    """Error for an argument of the wrong kind."""


class MissingPackageError(HastenError, ImportError):
    """Error for an optional package that is missing or too old."""


class ExtensionError(HastenError):
    """An extension is absent, broken, or provides a name that another provides."""


class TopologyError(HastenError):
    """Error for an environment that describes an impossible set of processes."""


class LaunchError(HastenError):
    """Error for processes that could not be started or ended badly."""


class CommError(HastenError):
    """Error for a collective that cannot be carried out."""


class MismatchError(CommError):
    """Error for ranks that disagree on the operation, structure, shape or dtype of a collective."""


class MissingRanksError(CommError):
    """Error for ranks that did not reach a collective."""

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class PeerFailedError(CommError):
    """Error for an exception on another rank while this one was waiting for it."""


class StallError(CommError):
    """Error for ranks that waited for each other without progress, after which the job was ended.

    Recorded for the launcher, because nothing can be raised in the waiting ranks.
    """


class DeviceError(HastenError, RuntimeError):
    """Error for a device that is missing or lacks a requested capability."""


class PrepareError(HastenError, ValueError):
    """Error for an object that cannot be prepared as given."""


class PrecisionError(HastenError, ValueError):
    """Error for a precision that the device or model does not support."""


class StepError(HastenError, RuntimeError):
    """Error for a call of `backward()`, `step()` or a clipping method in an order that has no meaning."""


class LossScaleError(StepError):
    """Error for fp16 updates that were skipped so often in a row that no loss scale can be the cause."""


class DivergenceError(HastenError):
    """Error for ranks that hold different values where these must be equal.

    `cause`, `step`, `name` (of the first such value) and `ranks` (the deviating ones) describe the difference.
    """

    agreed = True

    def __init__(
        self,
        message: str = "",
        cause: str = "",
        step: int = 0,
        name: str = "",
        ranks: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.step = step
        self.name = name
        self.ranks = ranks


class NumbersError(HastenError):
    """Error for a loss or gradient that is nan, inf or far too large.

    `step` and `ranks` locate it; `samples` holds the dataset indices by rank, if known.
    """

    agreed = True

    def __init__(
        self,
        message: str = "",
        step: int = 0,
        ranks: tuple[int, ...] = (),
        samples: dict[int, list[int]] | None = None,
    ) -> None:
        super().__init__(message)
        self.step = step
        self.ranks = ranks
        self.samples = samples or {}


class DataError(HastenError):
    """Error for a loader, sampler or stream that is wrong, or inconsistent over ranks."""


class CheckpointError(HastenError):
    """Error for a checkpoint that cannot be written or read."""


class IncompleteCheckpointError(CheckpointError):
    """Error for a checkpoint that was never committed, or lacks one of its files."""


class CorruptCheckpointError(CheckpointError):
    """Error for a checkpoint whose size, checksum, structure or shape differs from what was written."""


class OtherModelError(CheckpointError, RuntimeError):
    """Error for a checkpoint whose tensors have other names, shapes or dtypes than the model's."""


class UnsafeCheckpointError(CheckpointError):
    """Error for a checkpoint that would run code when read, or access files outside its folder."""


class CheckpointVersionError(CheckpointError):
    """Error for a checkpoint written by a version that this one cannot read."""


class LoaderStateError(CheckpointError, DataError):
    """Error for a loader's state that is damaged, or that another program wrote."""


class HookError(CheckpointError):
    """Error for an exception in a hook of save_state or load_state, which is its cause on the rank of the hook."""


class CheckpointBusyError(CheckpointError):
    """Error for a folder that another process has kept locked for too long while saving there."""


class CheckpointReplacedError(CheckpointError):
    """Error for a checkpoint that other saves have replaced again and again while it was being read."""


class HubError(HastenError):
    """Error for an upload to the Hub, or a download from it, that failed; its text never holds a token."""


class TrackerError(HastenError):
    """Error for an experiment tracker that is unknown or cannot start."""


class RanksFailedError(HastenError):
    """Error for a function that failed on some ranks in the pool of test workers."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
