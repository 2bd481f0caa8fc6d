"""Trackers, one file for each tracking service; `BUILTINS` in `tracking/registry.py` lists them."""
