"""Settings of projects and checkpoints."""

from typing import Literal

from hasten.config.base import Section, setting, settings


@settings
class ProjectConfiguration(Section):
    """Where logs and checkpoints go, and which checkpoints are kept."""

    project_dir: str | None = setting(None, "folder (or URL) of the run", path=True)
    logging_dir: str | None = setting(None, "folder of tracker logs (default: project_dir)", path=True)
    automatic_checkpoint_naming: bool | None = setting(
        None,
        "checkpoints are numbered under project_dir/checkpoints: always (true), never (false; save_state needs a folder), "
        "or when save_state gets no folder (default)",
    )
    total_limit: int | None = setting(None, "number of newest checkpoints to keep", minimum=1)
    iteration: int = setting(0, "number of the next checkpoint", minimum=0)
    save_on_each_node: bool = setting(False, "machines do not share a file system: each writes the files it needs")
    keep_best: int | None = setting(None, "further checkpoints to keep: the best by best_metric", minimum=1)
    best_metric: str | None = setting(None, "metric that ranks checkpoints")
    best_mode: Literal["min", "max"] = setting("min", "whether lower or higher values are better")
    keep_every: int | None = setting(None, "further checkpoints to keep: every n-th", minimum=1)
    run_log: bool = setting(True, "write timings and events for `hasten report` to project_dir/run_log")
    checkpoint_arrival_s: float = setting(
        60.0, "seconds that save_state and load_state wait for ranks that have not arrived", minimum=0.1
    )
