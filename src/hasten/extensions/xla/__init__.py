"""torch_xla: TPUs, and XLA on the CPU for tests.

Start with `strategy.py`, which also averages gradients over hosts; `placing.py` shards parameters over devices.
"""
