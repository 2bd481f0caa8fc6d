"""Experiment tracking to files and services, and the run log that `hasten report` reads.

Start with `base.py` (the Tracker class), `manager.py` and `registry.py`; a new tracker is one file in `backends/` and one line
in the registry.
"""
