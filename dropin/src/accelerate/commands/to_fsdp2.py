"""`accelerate to-fsdp2`: a settings file with FSDP2's names."""

from accelerate._impl.commands.to_fsdp2 import *
