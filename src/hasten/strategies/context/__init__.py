"""Context parallelism: each sequence is sharded over ranks, and attention spans all shards.

Start with `strategy.py`; `sequence_plan.py` (pure) gives the positions of each rank, `attention.py` and `sdpa.py` compute attention, `masks.py`
completes masks, and `calls.py` completes the arguments of a model's call.
"""
