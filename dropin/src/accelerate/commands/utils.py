"""What commands share: parsers that take hyphens and underscores, and errors as one sentence."""

from accelerate._impl.environment.parsers import *
