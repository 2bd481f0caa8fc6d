"""Names of files, kinds and limits that scripts import."""

from accelerate._impl.environment.constants import *
