"""Experiment tracking to files and services, and the run log that `hasten report` reads.

Start with `base.py` (the Tracker class), `manager.py` and `registry.py`; a new built-in tracker is one file in `backends/` and one
line in `BUILTINS` (`registry.py`), with a reader for its test, the extra `trackers` and a row in `docs/tracking.md`. A custom one needs none of this.
"""
