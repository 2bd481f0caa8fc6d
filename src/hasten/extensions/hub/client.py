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
_REFUSED: Final = (401, 403)
_MOST_CAUSES: Final = 4


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


def upload(
    folder: str | Path,
    target: HubRepository,
    message: str,
) -> str:
    """Upload a folder as one commit, creating the repository if it is new; return the commit's URL.

    Large files are sent before the commit: after an interruption, those that have arrived are not sent again. Weight files of an
    earlier commit that the folder lacks are deleted. A model card in the repository that was edited by hand is not replaced.
    Ranks: main only. Raises: HubError; the repository then shows its previous commit.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(
            f"{folder} is not a folder, so there is nothing to upload; save the model there first."
        )
    client = _client(target)

    def send() -> str:
        created = client.create_repo(
            target.repo_id, private=target.private, exist_ok=True
        )
        repository = str(created.repo_id)
        if target.revision is not None:
            client.create_branch(repository, branch=target.revision, exist_ok=True)
        unwanted = [
            ".hasten-*",
            *_cards_to_skip(client, root, repository, target.revision),
        ]
        sent = {
            path.relative_to(root).as_posix()
            for path in root.rglob("*")
            if path.is_file()
        }
        sent = {
            path
            for path in sent
            if not any(fnmatch.fnmatch(path, pattern) for pattern in unwanted)
        }
        there = client.list_repo_files(repository, revision=target.revision)
        given = {
            "revision": target.revision,
            "delete_patterns": _stale_weights(there, sent),
        }
        return str(
            client.upload_folder(
                repo_id=repository,
                folder_path=str(root),
                commit_message=message,
                ignore_patterns=unwanted,
                **given,
            )
        )

    return _guarded(send, target, f"the upload to {target.repo_id}", _UPLOAD_FAILED)


_UPLOAD_FAILED: Final = "The repository still shows its previous commit; push again: large files that have arrived are not sent again."
_DOWNLOAD_FAILED: Final = "Nothing was loaded; check the name, the revision and the connection. Files that have arrived are reused."


def download(target: HubRepository) -> Path:
    """Download the weight files of a model into the client's cache and return their folder; safetensors come first.

    Ranks: one per machine. Raises: HubError if the repository cannot be read or holds no weights.
    """
    client = _client(target)

    def fetch() -> Path:
        found = list(client.list_repo_files(target.repo_id, revision=target.revision))
        weights = [name for name in found if WEIGHT_FILE.fullmatch(name)]
        safe = [name for name in weights if ".safetensors" in name]
        if not weights:
            raise HubError(
                f"{target.repo_id} holds {', '.join(found[:5]) or 'no files'} and no weights, so nothing was loaded; give the name "
                "of a repository with model.safetensors or pytorch_model.bin, or an index of shards."
            )
        return Path(
            client.snapshot_download(
                target.repo_id, revision=target.revision, allow_patterns=safe or weights
            )
        )

    return _guarded(
        fetch, target, f"the download of {target.repo_id}", _DOWNLOAD_FAILED
    )


def _client(target: HubRepository) -> Any:  # Any: the client is a foreign class
    return need("huggingface_hub", ">=0.30", why="the Hub").HfApi(token=target.token)


def _cards_to_skip(
    client: Any, root: Path, repository: str, revision: str | None
) -> list[str]:
    """Return the card's name if the folder's card is generated and the repository's was edited by hand."""
    here = root / CARD_NAME
    if not here.is_file() or not is_generated(here.read_text("utf-8")):
        return []
    if not client.file_exists(repository, CARD_NAME, revision=revision):
        return []
    there = Path(client.hf_hub_download(repository, CARD_NAME, revision=revision))
    if is_generated(there.read_text("utf-8")):
        return []
    _log.info("the model card of %s was edited by hand and is not replaced", repository)
    return [CARD_NAME]


def _stale_weights(there: Sequence[str], sent: set[str]) -> list[str] | None:
    """Return the repository's weight files that a commit with other weight files makes obsolete."""
    if not any(WEIGHT_FILE.fullmatch(name) for name in sent):
        return None
    return [
        name for name in there if WEIGHT_FILE.fullmatch(name) and name not in sent
    ] or None


def _guarded(call: Callable[[], T], target: HubRepository, what: str, remedy: str) -> T:
    """Return the result of a call of the client. Raises: HubError without a cause, whose text could hold the token."""
    try:
        return call()
    except HastenError:
        raise
    # errors of several packages; raised again without the token
    except Exception as error:
        problem = HubError(_message(error, target, what, remedy))
    raise problem  # outside of the handler, so that the error has no context either


def _message(error: Exception, target: HubRepository, what: str, remedy: str) -> str:
    chain = _chain(error)
    if any(
        getattr(getattr(link, "response", None), "status_code", None) in _REFUSED
        for link in chain
    ):
        remedy += (
            " If the token was refused, give one with access to the repository (hub_token of TrainingArguments, token of "
            "push_to_hub), or log in with `hf auth login`."
        )
    texts = (
        f"{type(link).__name__}: {' '.join(str(link).split())}".rstrip(".: ")
        for link in chain
    )
    return (
        f"{what} failed: {clean(', because of '.join(texts), target.secrets)}. {remedy}"
    )


def _chain(error: BaseException) -> list[BaseException]:
    """Return the error and its causes, without those whose text is in an earlier one."""
    found: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and len(found) < _MOST_CAUSES:
        if not any(str(link) in str(earlier) for earlier in found):
            found.append(link)
        link = link.__cause__ or (
            None if link.__suppress_context__ else link.__context__
        )
    return found


def clean(text: str, secrets: Sequence[str]) -> str:
    """Return the text with these secrets, and everything that looks like one, masked."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return masked(text, digests=True)
