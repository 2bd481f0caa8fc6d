"""What a tracker of one's own is called with."""

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker


class Kept(GeneralTracker):
    name = "kept"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.seen = []

    @property
    def tracker(self):
        return self.seen

    def store_init_configuration(self, values):
        self.seen.append(["config", values])

    def log(self, values, step=None, **kwargs):
        self.seen.append([values, step, kwargs])

    def finish(self):
        self.seen.append("end")


def run() -> object:
    tracker = Kept()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("project", config={"lr": 0.1})
    accelerator.log({"loss": 1.0}, step=3)
    accelerator.log({"loss": 2.0}, log_kwargs={"kept": {"extra": 1}})
    observations = [
        type(accelerator.get_tracker("kept")).__name__,
        accelerator.get_tracker("kept", unwrap=True) is tracker.seen,
    ]
    return [observations, tracker.seen]


PROCESSES = (1,)
