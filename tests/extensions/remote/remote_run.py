"""A program that saves and resumes a run at a URL; run as a script, on an S3 server of its own."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hasten import Accelerator
from hasten.checkpoint.store.local_store import locate, open_store
from hasten.errors import CheckpointError
from hasten.optional import need


def resumes(url: str) -> None:
    """A whole run saved at a URL, by number, in the background, and loaded again."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, project_dir=url)
    model, optimizer = accelerator.prepare(*_pair())

    def hook(
        models: list[nn.Module], weights: list[dict[str, Any]], folder: str
    ) -> None:
        (Path(folder) / "note.txt").write_text("from a hook")

    accelerator.register_save_state_pre_hook(hook)
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    accelerator.save_state()
    where = accelerator.save_state(blocking=False)
    accelerator.wait_for_saves()
    assert where.endswith("checkpoints/checkpoint_1")
    saved = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state()
    assert all(
        torch.equal(a, b) for a, b in zip(saved, model.parameters(), strict=True)
    )
    store, name = locate(where)
    assert "note.txt" in {file.name for file in store.manifest(name).files}
    accelerator.end_training()


def _pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters())


PER_SAVE = 5
"""Objects that one save below puts into the bucket: the mark of its number first, the manifest last."""


def save_until_killed(url: str, endpoint: str, uploads: int) -> None:
    """Save again and again; the power goes when one more than so many objects are to be put into the bucket."""
    connect(endpoint)
    client = need("aiobotocore.client").AioBaseClient
    call, puts = client._make_api_call, iter(range(uploads))

    async def counted(self: object, operation: str, arguments: Any) -> object:
        if operation == "PutObject" and next(puts, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return await call(self, operation, arguments)

    client._make_api_call = counted
    accelerator = Accelerator(cpu=True, project_dir=url)
    model = accelerator.prepare(nn.Linear(20, 20))
    number = restored(accelerator, model)
    while True:
        number += 1
        with torch.no_grad():
            model.weight.fill_(number)
        accelerator.save_state()


def restored(accelerator: Accelerator, model: nn.Module) -> int:
    """The number in the newest complete checkpoint; 0 when there is none."""
    try:
        accelerator.load_state()
    except CheckpointError:
        return 0
    (number,) = {
        int(value) for value in model.get_parameter("weight").flatten().tolist()
    }
    return number


class Saver:
    """A forked process that saves until it is killed, made before this process has threads."""

    def __init__(self, url: str, uploads: int) -> None:
        orders, self._order = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._order)  # so that it ends when this process does
            try:
                if endpoint := os.read(orders, 100).decode():
                    save_until_killed(url, endpoint, uploads)
            finally:
                os._exit(1)

    def run(self, endpoint: str) -> None:
        """Let it save, to its end."""
        os.write(self._order, endpoint.encode())
        assert os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1]) == -signal.SIGKILL


def survives_kills(url: str, endpoint: str, savers: list[Saver]) -> None:
    """Wherever in a save the process is killed, the newest complete checkpoint is the one before, and it is whole."""
    accelerator = Accelerator(cpu=True, project_dir=url)
    model = accelerator.prepare(nn.Linear(20, 20))
    for number, saver in enumerate(savers, start=1):
        saver.run(endpoint)
        assert restored(accelerator, model) == number
    names = {
        Path(item).name
        for item in need("fsspec")
        .filesystem("s3")
        .ls(f"{url}/checkpoints", refresh=True)
    }
    store = open_store(f"{url}/checkpoints")
    assert len(store.names()) == len(savers)
    assert len(names) == 2 * len(savers), (
        "each has left an unfinished checkpoint, under a number that nobody else takes"
    )
    last = Path(accelerator.save_state()).name
    assert last == f"checkpoint_{2 * len(savers)}"
    assert store.names() == sorted({*store.names(), last})


def has_a_number_for_each(url: str) -> None:
    """Saves at the same time get different numbers, and those under one name do not mix."""
    store = open_store(url)
    drafts = [open_store(url).begin_numbered(0) for _ in range(3)]
    assert [draft.name for draft in drafts] == [
        "checkpoint_0",
        "checkpoint_1",
        "checkpoint_2",
    ]
    named_drafts = [open_store(url).begin("best") for _ in range(2)]
    assert named_drafts[0].token != named_drafts[1].token
    for draft in (*drafts, *named_drafts):
        draft.abort()
    assert not store.names()
    assert not need("fsspec").filesystem("s3").find(url), "nothing is left"


def connect(endpoint: str) -> None:
    """Let S3 clients of this process talk to the server."""
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    os.environ["AWS_ENDPOINT_URL"] = endpoint


def main() -> None:
    need("s3fs")
    url = "s3://bucket/killed"
    # Each saves once more than the one before it and dies in the next save: among the files, and before the manifest.
    savers = [Saver(url, PER_SAVE + uploads) for uploads in (1, PER_SAVE - 1)]
    server = need("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    connect(f"http://{host}:{port}")
    need("fsspec").filesystem("s3").mkdir("bucket")
    resumes("s3://bucket/run")
    has_a_number_for_each("s3://bucket/writers")
    survives_kills(url, f"http://{host}:{port}", savers)
    try:
        Accelerator(cpu=True).save_state("s3://absent-bucket/run/out")
    except CheckpointError:
        sys.stdout.write("resumed\n")
    server.stop()


if __name__ == "__main__":
    main()
