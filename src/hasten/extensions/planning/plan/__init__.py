"""`hasten plan`: memory, traffic and time of a training step on any number of devices, from one traced step.

Start with `search.py` (pure: ranks the layouts); `trace.py` runs a step on fake tensors; `memory.py`, `traffic.py` and `speed.py` hold the
formulas.
"""
