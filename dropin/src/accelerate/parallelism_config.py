"""ParallelismConfig: the sizes of the mesh under their established names."""

from accelerate._impl.settings.parallelism import *
