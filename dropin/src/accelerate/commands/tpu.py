"""`accelerate tpu-config`: run commands on every machine of a TPU pod, by gcloud."""

from accelerate._impl.commands.tpu import *
