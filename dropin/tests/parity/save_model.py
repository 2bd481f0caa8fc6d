"""A model exported whole and in shards."""

import os
import tempfile

from torch import nn

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list


def run() -> object:
    accelerator = Accelerator(cpu=True)
    folder = broadcast_object_list([tempfile.mkdtemp()])[0]
    model = accelerator.prepare(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    accelerator.save_model(model, folder + "/one")
    accelerator.save_model(model, folder + "/many", max_shard_size="20KB")
    accelerator.save_model(model, folder + "/bin", safe_serialization=False)
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    return [sorted(os.listdir(folder + name)) for name in ("/one", "/many", "/bin")] + [
        list(state)
    ]


PROCESSES = (1, 2)
