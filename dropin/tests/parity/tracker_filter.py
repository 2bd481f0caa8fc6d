"""Which trackers are chosen from what was asked for."""

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, filter_trackers, get_available_trackers


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
    accelerator = Accelerator(cpu=True)
    assert accelerator is not None
    observations = [
        str(tracker) for tracker in filter_trackers(["tensorboard"], "logs")
    ]
    try:
        filter_trackers(["nothing"])
    except ValueError as error:
        observations.append(type(error).__name__)
    try:
        filter_trackers(["tensorboard"])
    except ValueError as error:
        observations.append(type(error).__name__)
    return [
        observations,
        "tensorboard" in [str(tracker) for tracker in get_available_trackers()],
        [type(tracker).__name__ for tracker in filter_trackers([Kept()])],
    ]


PROCESSES = (1,)
