"""Settings of projects and checkpoints."""

from typing import Literal

from hasten.config.base import Section, setting, settings


@settings
class ProjectConfiguration(Section):
    """Where logs and checkpoints go, and which checkpoints are kept."""

    project_dir: str | None = setting(None, "folder (or URL) of the run")
    logging_dir: str | None = setting(None, "folder of tracker logs (default: project_dir)")
    automatic_checkpoint_naming: bool | None = setting(
        None,
        "checkpoints are numbered under project_dir/checkpoints: always (true), never (false; save_state needs a folder), "
        "or when save_state gets no folder (default)",
    )
    total_limit: int | None = setting(None, "checkpoints kept, the newest ones", minimum=1)
    iteration: int = setting(0, "number of the next checkpoint", minimum=0)
    save_on_each_node: bool = setting(False, "machines do not share a disk: each writes what it needs")
    keep_best: int | None = setting(None, "checkpoints kept besides, the best ones by best_metric", minimum=1)
    best_metric: str | None = setting(None, "metric that ranks checkpoints")
    best_mode: Literal["min", "max"] = setting("min", "whether a small or a large metric is good")
    keep_every: int | None = setting(None, "checkpoints kept besides: every n-th", minimum=1)
    run_log: bool = setting(True, "leave timings and events for `hasten report` in project_dir/run_log")
    checkpoint_arrival_s: float = setting(
        60.0, "seconds that save_state and load_state wait for ranks that do not come", minimum=0.1
    )
