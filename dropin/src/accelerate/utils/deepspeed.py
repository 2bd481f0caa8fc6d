"""DeepSpeed: its configuration, stand-ins for what it makes, and the established names of what prepare() returns."""

from accelerate._impl.optim.deepspeed import *
from accelerate._impl.settings.deepspeed_config import HfDeepSpeedConfig
from hasten.extensions.deepspeed.placeholders import DummyOptim, DummyScheduler
