"""Loading models with the layers of bitsandbytes, on top of hasten's quantization."""

from accelerate._impl.models.bnb import *
