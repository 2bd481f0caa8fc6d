"""Uploads of models to the Hub from a training run: one rank sends in the background, and its errors reach every rank."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from hasten.accelerator.arguments import PushOptions
from hasten.checkpoint.export import save_model
from hasten.checkpoint.store.local_store import is_url
from hasten.comm.agreement import agreeing
from hasten.comm.base import Comm
from hasten.errors import ArgumentError, HubError
from hasten.extensions.hub import client as hub
from hasten.extensions.hub.client import SCHEME, HubRepository
from hasten.extensions.hub.model_card import (
    CARD_NAME,
    CardContent,
    is_generated,
    model_card,
)

_log = logging.getLogger(__name__)
_LONGEST_WAIT_S: Final = 1.0
STAGED: Final = ".hasten-hub-"
"""Start of the names of folders whose files are being uploaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderPush:
    """A folder to upload, and the message of its commit."""

    folder: Path
    target: HubRepository
    message: str

    def upload_folder(self) -> str:
        """Upload the folder, delete it, and return the commit's URL."""
        try:
            return hub.upload_folder(self.folder, self.target, self.message)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


class BackgroundCall:
    """Function that runs in a thread, with its result or error."""

    # Any: the result of the call
    def __init__(self, call: Callable[[], Any], name: str) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run_call, name=name, daemon=False)
        self._thread.start()

    def _run_call(self) -> None:
        try:
            self.result = self._call()
        # raised in the main thread at the next push, or at the end
        except Exception as error:
            self.error = error

    def has_ended(self, timeout_s: float) -> bool:
        """Return whether the call has ended, after waiting for it no longer than this."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


# Any: the result of the call
def finish_together(
    comm: Comm, background_call: BackgroundCall | None, label: str
) -> Any:
    """Wait until every rank's call has ended; return this rank's result, or None without a call.

    Ranks exchange one number at least every second, so that no collective waits as long as an upload does.
    Ranks: every rank. Raises: the error of a rank's call, with the same class and message on every rank.
    """
    pause_s = 0.02
    while True:
        has_ended = background_call is None or background_call.has_ended(pause_s)
        if comm.size > 1:
            has_ended = bool(
                comm.all_reduce(
                    torch.tensor([has_ended], dtype=torch.int32), "min"
                ).item()
            )
        if has_ended:
            break
        pause_s = min(2 * pause_s, _LONGEST_WAIT_S)
    with agreeing(comm, label):
        if background_call is not None and background_call.error is not None:
            raise background_call.error
    return None if background_call is None else background_call.result


def _log_failure(send: Callable[[], str]) -> str:
    """Return the result of an upload, and log its error at once: it is raised only at the next push, or at the end."""
    try:
        return send()
    except HubError as error:
        _log.error("%s", error)
        raise


class Publishing:
    """Uploads of a run's models to the Hub, one at a time, by the main process."""

    def __init__(
        self,
        comm: Comm,
        is_main: bool,
        facts: Callable[[], Mapping[str, Any]],
        project_dir: str | None,
    ) -> None:  # Any: numbers and strings
        """Set up without a running upload; `facts` describes the run for model cards."""
        self._comm = comm
        self._is_main = is_main
        self.facts = facts
        if project_dir is None or is_url(project_dir):
            self._scratch = None
        else:
            self._scratch = project_dir
        self._running: BackgroundCall | None = None
        self._started = False

    @staticmethod
    def download(comm: Comm, address: str, downloads: bool) -> Path:
        """Return the folder of a model on the Hub, downloaded by one rank of each machine. Ranks: every rank.

        Raises: ArgumentError for an invalid address; HubError if the download fails.
        """
        hub_repository = hub.parse_address(address)
        call = None
        if downloads:
            call = BackgroundCall(
                lambda: hub.download_model(hub_repository), "hasten-download"
            )
        model_folder: Path | None = finish_together(comm, call, "load_model")
        # reads the cache that the machine's first rank filled
        return (
            hub.download_model(hub_repository) if model_folder is None else model_folder
        )

    def wait(self) -> str | None:
        """Wait for the running upload, if any; return the commit's URL on the main process.

        Ranks: every rank. Raises: HubError if the upload has failed.
        """
        if not self._started:
            return None
        background_call = self._running
        self._running = None
        self._started = False
        commit_url: str | None = finish_together(
            self._comm, background_call, "push_to_hub"
        )
        return commit_url

    def push(self, folder_push: FolderPush | None, blocking: bool) -> str | None:
        """Start the upload of a folder, given on the main process; if blocking, wait for it and return the commit's URL.

        Ranks: every rank, after `wait`.
        """
        if self._is_main and folder_push is not None:
            if blocking:
                send = folder_push.upload_folder
            else:
                send = partial(_log_failure, folder_push.upload_folder)
            self._running = BackgroundCall(send, "hasten-push")
        self._started = True
        return self.wait() if blocking else None

    def staging_folder(self) -> Path:
        """Create a folder whose files stay as they are while they are uploaded. Ranks: main only."""
        if self._scratch is not None:
            Path(self._scratch).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=STAGED, dir=self._scratch))

    def write_card(self, folder: Path, content: CardContent) -> None:
        """Write the model card, unless the folder has one that was written by hand. Ranks: main only."""
        card_path = folder / CARD_NAME
        if card_path.is_file() and not is_generated(card_path.read_text("utf-8")):
            return
        card_path.write_text(model_card(content), encoding="utf-8")

    def push_model(
        self,
        model: nn.Module,
        weights: Mapping[str, Any],
        repo_id: str,
        metrics: Mapping[str, Any] | None,
        blocking: bool,
        options: PushOptions,
    ) -> str | None:  # Any: tensors and extra state; numbers
        """Write a model's weights, configuration and card to a folder and upload it. Ranks: every rank, after `wait`."""
        _check_options(repo_id, options)
        folder_push: FolderPush | None = None
        with agreeing(self._comm, "push_to_hub"):
            if self._is_main:
                folder = self.staging_folder()
                try:
                    self._write_folder(folder, model, weights, options)
                    if hasattr(model, "save_pretrained"):
                        library = "transformers"
                    else:
                        library = None
                    self.write_card(
                        folder,
                        CardContent(
                            name=repo_id,
                            library=library,
                            metrics=metrics or {},
                            run=self.facts(),
                        ),
                    )
                except BaseException:
                    shutil.rmtree(folder, ignore_errors=True)
                    raise
                hub_repository = HubRepository(
                    repo_id,
                    options.get("token"),
                    options.get("private"),
                    options.get("revision"),
                )
                message = options.get("commit_message", "Upload model")
                folder_push = FolderPush(
                    folder=folder, target=hub_repository, message=message
                )
        return self.push(folder_push, blocking)

    def _write_folder(
        self, folder: Path, model: Any, weights: Mapping[str, Any], options: PushOptions
    ) -> None:
        max_shard_size = options.get("max_shard_size", "10GB")
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(
                str(folder), state_dict=dict(weights), max_shard_size=max_shard_size
            )
        else:
            save_model(weights, folder, max_shard_size)
        if (tokenizer := options.get("tokenizer")) is not None:
            tokenizer.save_pretrained(str(folder))


def _check_options(repo_id: str, options: PushOptions) -> None:
    unknown = sorted(set(options) - PushOptions.__annotations__.keys())
    if unknown:
        raise ArgumentError(
            f"push_to_hub() was given {', '.join(unknown)}, which it does not know, so it would have no effect; the options are "
            f"{', '.join(PushOptions.__annotations__)}."
        )
    if not repo_id or str(repo_id).startswith(SCHEME):
        raise ArgumentError(
            f"push_to_hub(repo_id) was given {repo_id!r}, which names no repository, so there is nothing to upload to; give "
            "'owner/name'."
        )
