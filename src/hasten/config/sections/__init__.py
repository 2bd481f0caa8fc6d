"""Sections of the settings, each a frozen class: the loop, parallelism, engines, launching, checks of a run.

Start with `loop.py`; `parallel.py` holds the mesh, DDP and FSDP, sections of engines are in their extensions,
`trust.py` the checks for stalls, diverging ranks and bad losses.
"""
