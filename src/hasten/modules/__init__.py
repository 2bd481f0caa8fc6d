"""Modules of a model: names independent of wrappers, tied parameters, hooks, and replaceable forwards.

Start with `names.py`; `forwarding.py` replaces and restores a forward, `hooks.py` holds Accelerate's hook classes.
"""
