"""Modules of a model: names that survive wrapping, ties, hooks, and the one file that replaces a forward.

Start with `names.py`; `forwarding.py` replaces a forward and undoes it, `hooks.py` holds the established hook classes.
"""
