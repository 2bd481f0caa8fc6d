"""Trackers with the established interface: hasten's backends underneath, users' own classes beside them."""

from accelerate._impl.trackers import *
