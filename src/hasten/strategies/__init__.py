"""Strategies: how a model is spread over processes, as transforms that compose or as an engine that takes over.

Start with `base.py` (the protocol), `choose.py` (settings to a strategy) and `native.py` (torch's own, composed). Each parallelism has a folder;
engines lie in `engines/`. `placing.py`, `recompute.py` and `compiling.py` are transforms that every layout shares.
"""
