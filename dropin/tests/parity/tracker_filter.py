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
    found = [str(one) for one in filter_trackers(["tensorboard"], "logs")]
    try:
        filter_trackers(["nothing"])
    except ValueError as error:
        found.append(type(error).__name__)
    try:
        filter_trackers(["tensorboard"])
    except ValueError as error:
        found.append(type(error).__name__)
    return [
        found,
        "tensorboard" in [str(one) for one in get_available_trackers()],
        [type(one).__name__ for one in filter_trackers([Kept()])],
    ]


PROCESSES = (1,)
