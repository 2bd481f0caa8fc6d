"""Sections of the settings, each a frozen class: the loop, parallelism, engines, launching, checks of a run.

Start with `loop.py`; `parallel.py` holds the mesh, DDP and FSDP, `engines.py` DeepSpeed, Megatron-LM and XLA,
`trust.py` the checks for stalls, diverging ranks and bad losses.
"""
