"""torch_xla: TPUs, and XLA on the CPU for tests.

Start with `strategy.py`; `placing.py` shards parameters over devices, `hosts.py` averages gradients over hosts.
"""
