"""Expert parallelism: experts divided among data-parallel ranks, tokens exchanged all to all.

Start with `strategy.py`; `plan.py` finds the experts, `ops.py` exchanges tokens.
"""
