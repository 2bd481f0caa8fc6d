"""Program of the backend tests: log, resume, log on; then read everything back with the package's own reader.

Usage: backend_probe.py NAME FOLDER. The last line of the output is JSON: the curve, the run ids and what else was found.
"""

from __future__ import annotations

import json
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hasten import read_metrics
from hasten.optional import need
from hasten.tracking.manager import TrackerManager
from hasten.tracking.registry import build_trackers

OPTIONS: dict[str, dict[str, Any]] = {
    "wandb": {"mode": "offline"},
    "comet_ml": {"online": False, "log_code": False, "log_env_details": False},
    "clearml": {
        "offline": True,
        "auto_resource_monitoring": False,
        "auto_connect_streams": False,
    },
    "swanlab": {"mode": "offline"},
    "aim": {"system_tracking_interval": None},
}
# two offline tasks in one process hang now and then inside the package
ONCE = ("clearml",)
Curve = list[tuple[int, float]]


def train(
    name: str, folder: Path, state: dict[str, Any] | None, steps: range, failed: bool
) -> dict[str, Any]:
    """One process of a training that logs a loss 1/(step+1), a string, two images and a table."""
    manager = TrackerManager(build_trackers(name), directory=folder)
    manager.init(
        "project", {"lr": 0.1, "model": {"depth": 2}}, {name: OPTIONS.get(name, {})}
    )
    if state:
        manager.load_state_dict(state)
    for step in steps:
        manager.log(
            {"train": {"loss": torch.tensor(1.0 / (step + 1))}, "note": "hello"},
            step=step,
        )
    manager.log_images(
        {"picture": np.zeros((2, 8, 8, 3)), "gray": np.ones((8, 8))}, step=steps[-1]
    )
    manager.log_table(
        "answers", ["question", "score"], [["a", 1.0], ["b", 2.0]], step=steps[-1]
    )
    tracker_state = manager.state_dict()
    manager.finish(failed)
    return tracker_state


def read_jsonl(folder: Path, run_id: str) -> Curve:
    return [
        (row["step"], row["train/loss"])
        for row in read_metrics(folder / "project" / run_id)
    ]


def read_tensorboard(folder: Path, run_id: str) -> Curve:
    reader = need("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder / "project" / run_id))
    events.Reload()
    assert len(events.Images("picture/0")) >= 1
    return [(event.step, event.value) for event in events.Scalars("train/loss")]


def read_mlflow(folder: Path, run_id: str) -> Curve:
    mlflow = need("mlflow")
    database = folder / "mlflow.db"
    uri = (
        f"sqlite:///{database}"
        if database.exists()
        else (folder / "mlruns").absolute().as_uri()
    )
    client = mlflow.MlflowClient(uri)
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"lr": "0.1", "model/depth": "2"}
    assert run.data.tags["note"] == "hello"
    return [
        (metric.step, metric.value)
        for metric in client.get_metric_history(run_id, "train/loss")
    ]


def leveldb_records(path: Path) -> list[bytes]:
    """The records of a LevelDB log with a seven-byte header, which is what a `.wandb` file is."""
    data, records, pending_bytes, offset = path.read_bytes(), [], b"", 7
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:  # the rest of a block is padding
            offset += 32768 - offset % 32768
            continue
        size, kind = (
            int.from_bytes(data[offset + 4 : offset + 6], "little"),
            data[offset + 6],
        )
        pending_bytes += data[offset + 7 : offset + 7 + size]
        if kind in (1, 4):  # a full record, or the last piece of one
            records.append(pending_bytes)
            pending_bytes = b""
        offset += 7 + size
    return records


def finished_records(path: Path, kind: Any) -> list[Any]:
    """The records of a run that has ended; the service's own process may close the file a little after `finish`."""
    for _ in range(100):
        records = [kind.FromString(raw) for raw in leveldb_records(path)]
        if any(record.HasField("exit") for record in records):
            break
        time.sleep(0.2)
    return records


def read_wandb(folder: Path, run_id: str) -> Curve:
    proto = need("wandb.proto.wandb_internal_pb2")
    curve: Curve = []
    files = sorted((folder / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert len(files) == 2, (
        "each process of an offline run has its own file; they share the id"
    )
    for path in files:
        for record in finished_records(path, proto.Record):
            items = {
                item.key or "/".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            if "train/loss" in items:
                curve.append((int(items["_step"]), float(items["train/loss"])))
    assert list(
        (folder / "wandb").glob("offline-run-*/files/media/images/picture*.png")
    )
    assert list(
        (folder / "wandb").glob("offline-run-*/files/media/table/answers*.json")
    )
    return curve


def read_comet_ml(folder: Path, run_id: str) -> Curve:
    curve: Curve = []
    for path in sorted(
        (folder / "project" / "comet").glob(f"{run_id}*.zip"),
        key=lambda path: path.stat().st_mtime,
    ):
        with zipfile.ZipFile(path) as archive:
            for line in archive.read("messages.json").decode().splitlines():
                metric = json.loads(line)["payload"].get("metric") or {}
                if metric.get("metricName") == "train/loss":
                    curve.append((metric["step"], metric["metricValue"]))
    return curve


def read_aim(folder: Path, run_id: str) -> Curve:
    aim = need("aim")
    # read-only views show a run only after `aim up` has indexed it, so it is opened once more instead
    run = aim.Run(
        run_id,
        repo=str(folder),
        force_resume=True,
        system_tracking_interval=None,
        capture_terminal_logs=False,
    )
    assert run["config"]["lr"] == 0.1
    metric = next(item for item in run.metrics() if item.name == "train/loss")
    steps, (values, *_) = metric.data.items_list()
    return list(zip(steps, values, strict=True))


def read_clearml(folder: Path, run_id: str) -> Curve:
    path = Path(need("clearml.config").get_offline_dir(run_id)) / "metrics.jsonl"
    events = [
        event for line in path.read_text().splitlines() for event in json.loads(line)
    ]
    return [
        (event["iter"], event["value"])
        for event in events
        if event.get("variant") == "loss"
    ]


def read_dvclive(folder: Path, run_id: str) -> Curve:
    load_yaml, parse_tsv = (
        need("dvclive.serialize").load_yaml,
        need("dvclive.utils").parse_tsv,
    )
    base = folder / "project" / run_id / "dvclive"
    assert load_yaml(base / "params.yaml") == {"lr": 0.1, "model": {"depth": 2}}
    return [
        (int(row["step"]), float(row["loss"]))
        for row in parse_tsv(base / "plots/metrics/train/loss.tsv")
    ]


def read_swanlab(folder: Path, run_id: str) -> Curve:
    proto = need("swanlab.proto.swanlab.record.v1.record_pb2")
    store = need("swanlab.sdk.internal.core_python.store")
    curve: Curve = []
    for path in sorted((folder / "swanlab").glob(f"**/run-{run_id}.swanlab")):
        reader = store.DataStoreReader()
        reader.open(path)
        for raw in reader:
            record = proto.Record()
            record.ParseFromString(raw)
            if record.HasField("scalar") and record.scalar.key == "train/loss":
                curve.append((record.scalar.step, record.scalar.value.number))
        reader.close()
    return curve


def read_trackio(folder: Path, run_id: str) -> Curve:
    trackio = need("trackio")
    assert [run.name for run in trackio.Api().runs("project")] == [run_id]
    rows = trackio.SQLiteStorage.get_logs("project", run_id)
    return [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    first = train(name, folder, None, range(5), failed=name not in ONCE)
    # the checkpoint was written at step 2, the process died after step 4
    first["step"] = 2
    second = (
        first if name in ONCE else train(name, folder, first, range(3, 8), failed=False)
    )
    ids = [state["runs"][name] for state in (first, second)]
    curve = globals()[f"read_{name}"](folder, ids[-1])
    sys.stdout.write(
        "\n" + json.dumps({"curve": curve, "ids": ids, "step": second["step"]}) + "\n"
    )


if __name__ == "__main__":
    main()
