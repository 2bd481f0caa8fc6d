"""What the clients share: sizes of a tiny model, arguments of a short quiet run, and writing down how it went."""

import json
import os
import sys
import warnings
from pathlib import Path

import torch

TINY = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 16,
}
SHORT = {
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "seed": 7,
    "disable_tqdm": True,
}


def history(trainer, *names):
    """The trainer's log, only with what does not depend on the clock."""
    return [
        {key: value for key, value in row.items() if key in names}
        for row in trainer.state.log_history
    ]


def weights(parameters):
    """One number for all weights."""
    return float(sum(p.double().abs().sum() for p in parameters))


def record(main):
    """Call `main(FOLDER)` and write what it gives to OUT.json, from the first rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder, out = sys.argv[1:3]
    result = main(folder)
    if int(os.environ.get("RANK", "0")) == 0:
        Path(out).write_text(json.dumps(result, indent=0) + "\n")
