"""Implementation of the public modules; its classes and functions get their public `__module__` when they are loaded."""

import sys

from accelerate._impl.surface.homes import Rooms

sys.meta_path.insert(0, Rooms)
