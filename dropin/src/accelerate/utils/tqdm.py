"""A progress bar on one process."""

from accelerate._impl.views.bars import *
