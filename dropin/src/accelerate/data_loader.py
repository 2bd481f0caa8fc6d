"""Preparing loaders: the established names, and how a plain DataLoader becomes one that reads its share."""

from accelerate._impl.loaders.base import *
from accelerate._impl.loaders.samplers import *
from accelerate._impl.loaders.share import *
