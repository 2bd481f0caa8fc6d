"""What the established launcher prepares for its processes: commands and environments, as data."""

from accelerate._impl.commands.starting import *
from accelerate._impl.environment.constants import DEEPSPEED_MULTINODE_LAUNCHERS
