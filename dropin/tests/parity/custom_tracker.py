"""A tracker of one's own gets settings and values on the main process."""

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker


class Memory(GeneralTracker):
    name = "memory"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self):
        super().__init__()
        self.seen = []

    @property
    def tracker(self):
        return self.seen

    def store_init_configuration(self, values):
        self.seen.append(["config", values])

    def log(self, values, step=None, **kwargs):
        self.seen.append([values, step])


def run() -> object:
    tracker = Memory()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("project", config={"lr": 0.1})
    accelerator.log({"loss": 1.5}, step=1)
    accelerator.log({"loss": 0.5}, step=2)
    logged = (
        accelerator.get_tracker("memory", unwrap=True)
        if accelerator.is_main_process
        else tracker.seen
    )
    accelerator.end_training()
    return logged


PROCESSES = (1, 2)
