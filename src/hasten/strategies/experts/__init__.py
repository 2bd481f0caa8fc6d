"""Expert parallelism: experts are sharded over data-parallel ranks, and tokens are exchanged all-to-all.

Start with `strategy.py`; `plan.py` finds the experts, `ops.py` exchanges tokens.
"""
