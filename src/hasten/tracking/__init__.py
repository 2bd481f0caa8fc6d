"""Experiment tracking, and the run log that `hasten report` reads.

Start with `base.py` (the Tracker class), `manager.py` and `registry.py`. `jsonl.py` writes to files; trackers of services are extensions.
"""
