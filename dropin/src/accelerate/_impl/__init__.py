"""The rooms behind the faces; what they define gets its home as they are loaded."""

import sys

from accelerate._impl.surface.homes import Rooms

sys.meta_path.insert(0, Rooms)
