"""Uploads of folders to the Hub and downloads of models from it, with errors that never hold a token."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from hasten.checkpoint.store.occupied import WEIGHT_FILE
from hasten.config.masking import HIDDEN, masked
from hasten.errors import ArgumentError, ConfigError, HastenError, HubError
from hasten.extensions.hub.model_card import CARD_NAME, is_generated
from hasten.optional import need

T = TypeVar("T")
SCHEME: Final = "hf://"
_log = logging.getLogger(__name__)
_REFUSED_STATUS_CODES: Final = (401, 403)
_MAX_CAUSES: Final = 4


@dataclass(frozen=True, slots=True)
class HubRepository:
    """Name of a repository on the Hub, its branch, and the token that may write to it; without a token, the client's login."""

    repo_id: str
    token: str | None = field(default=None, repr=False)
    private: bool | None = None
    revision: str | None = None

    @property
    def secrets(self) -> tuple[str, ...]:
        """The tokens that requests to this repository may carry."""
        client = need("huggingface_hub", why="the Hub")
        return tuple(token for token in (self.token, client.get_token()) if token)


def parse_address(address: str) -> HubRepository:
    """Return the repository of an address `hf://owner/name` or `hf://owner/name@revision`.

    Raises: ArgumentError for an address of another form.
    """
    name, _, revision = address.removeprefix(SCHEME).partition("@")
    if (
        not address.startswith(SCHEME)
        or name.count("/") != 1
        or not all(name.split("/"))
    ):
        raise ArgumentError(
            f"{address!r} is not the address of a model on the Hub, so nothing was loaded; write {SCHEME}owner/name or "
            f"{SCHEME}owner/name@revision."
        )
    return HubRepository(name, revision=revision or None)


def upload_folder(
    folder: str | Path,
    hub_repository: HubRepository,
    message: str,
) -> str:
    """Upload a folder as one commit, creating the repository if it is new; return the commit's URL.

    Large files are sent before the commit: after an interruption, those that have arrived are not sent again. Weight files of an
    earlier commit that the folder lacks are deleted. A model card in the repository that was edited by hand is not replaced.
    Ranks: main only. Raises: HubError; the repository then shows its previous commit.
    """
    local_folder = Path(folder)
    if not local_folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder, so there is nothing to upload; save the model there first."
        )
    client = _hub_client(hub_repository)

    def send_files() -> str:
        created = client.create_repo(
            hub_repository.repo_id, private=hub_repository.private, exist_ok=True
        )
        repository = str(created.repo_id)
        if hub_repository.revision is not None:
            client.create_branch(
                repository, branch=hub_repository.revision, exist_ok=True
            )
        ignored_patterns = [
            ".hasten-*",
            *_cards_to_skip(client, local_folder, repository, hub_repository.revision),
        ]
        sent_names = {
            path.relative_to(local_folder).as_posix()
            for path in local_folder.rglob("*")
            if path.is_file()
        }
        sent_names = {
            path
            for path in sent_names
            if not any(fnmatch.fnmatch(path, pattern) for pattern in ignored_patterns)
        }
        remote_names = client.list_repo_files(
            repository, revision=hub_repository.revision
        )
        upload_options = {
            "revision": hub_repository.revision,
            "delete_patterns": _stale_weights(remote_names, sent_names),
        }
        return str(
            client.upload_folder(
                repo_id=repository,
                folder_path=str(local_folder),
                commit_message=message,
                ignore_patterns=ignored_patterns,
                **upload_options,
            )
        )

    return _call_guarded(
        send_files,
        hub_repository,
        f"the upload to {hub_repository.repo_id}",
        _UPLOAD_FAILED,
    )


_UPLOAD_FAILED: Final = "The repository still shows its previous commit; push again: large files that have arrived are not sent again."
_DOWNLOAD_FAILED: Final = "Nothing was loaded; check the name, the revision and the connection. Files that have arrived are reused."


def download_model(target: HubRepository) -> Path:
    """Download the weight files of a model into the client's cache and return their folder; safetensors come first.

    Ranks: one per machine. Raises: HubError if the repository cannot be read or holds no weights.
    """
    client = _hub_client(target)

    def fetch_files() -> Path:
        remote_names = list(
            client.list_repo_files(target.repo_id, revision=target.revision)
        )
        weight_names = list(filter(WEIGHT_FILE.fullmatch, remote_names))
        safetensors_names = [
            file_name for file_name in weight_names if ".safetensors" in file_name
        ]
        if not weight_names:
            raise HubError(
                f"{target.repo_id} holds {', '.join(remote_names[:5]) or 'no files'} and no weights, so nothing was loaded; give the name "
                "of a repository with model.safetensors or pytorch_model.bin, or an index of shards."
            )
        return Path(
            client.snapshot_download(
                target.repo_id,
                revision=target.revision,
                allow_patterns=safetensors_names or weight_names,
            )
        )

    return _call_guarded(
        fetch_files, target, f"the download of {target.repo_id}", _DOWNLOAD_FAILED
    )


def _hub_client(target: HubRepository) -> Any:  # Any: the client is a foreign class
    return need("huggingface_hub", ">=0.30", why="the Hub").HfApi(token=target.token)


def _cards_to_skip(
    client: Any, local_folder: Path, repository: str, revision: str | None
) -> list[str]:
    """Return the card's name if the folder's card is generated and the repository's was edited by hand."""
    local_card = local_folder / CARD_NAME
    if not local_card.is_file() or not is_generated(local_card.read_text("utf-8")):
        return []
    if not client.file_exists(repository, CARD_NAME, revision=revision):
        return []
    remote_card = Path(client.hf_hub_download(repository, CARD_NAME, revision=revision))
    if is_generated(remote_card.read_text("utf-8")):
        return []
    _log.info("the model card of %s was edited by hand and is not replaced", repository)
    return [CARD_NAME]


def _stale_weights(
    remote_names: Sequence[str], sent_names: set[str]
) -> list[str] | None:
    """Return the repository's weight files that a commit with other weight files makes obsolete."""
    if not any(map(WEIGHT_FILE.fullmatch, sent_names)):
        return None
    return [
        file_name
        for file_name in remote_names
        if WEIGHT_FILE.fullmatch(file_name) and file_name not in sent_names
    ] or None


def _call_guarded(
    call: Callable[[], T], target: HubRepository, action: str, remedy: str
) -> T:
    """Return the result of a call of the client. Raises: HubError without a cause, whose text could hold the token."""
    try:
        return call()
    except HastenError:
        raise
    # errors of several packages; raised again without the token
    except Exception as error:
        hub_error = HubError(_error_message(error, target, action, remedy))
    raise hub_error  # outside of the handler, so that the error has no context either


def _error_message(
    error: Exception, target: HubRepository, action: str, remedy: str
) -> str:
    error_chain = _error_chain(error)
    if any(
        getattr(getattr(link, "response", None), "status_code", None)
        in _REFUSED_STATUS_CODES
        for link in error_chain
    ):
        remedy += (
            " If the token was refused, give one with access to the repository (hub_token of TrainingArguments, token of "
            "push_to_hub), or log in with `hf auth login`."
        )
    error_texts = (
        f"{type(link).__name__}: {' '.join(str(link).split())}".rstrip(".: ")
        for link in error_chain
    )
    return f"{action} failed: {mask_secrets(', because of '.join(error_texts), target.secrets)}. {remedy}"


def _error_chain(error: BaseException) -> list[BaseException]:
    """Return the error and its causes, without those whose text is in an earlier one."""
    error_chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and len(error_chain) < _MAX_CAUSES:
        if not any(str(link) in str(earlier_error) for earlier_error in error_chain):
            error_chain.append(link)
        link = link.__cause__ or (
            None if link.__suppress_context__ else link.__context__
        )
    return error_chain


def mask_secrets(text: str, secrets: Sequence[str]) -> str:
    """Return the text with these secrets, and everything that looks like one, masked."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return masked(text, digests=True)
