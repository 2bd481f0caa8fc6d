"""FSDP2 and hybrid sharding: parameters, gradients and optimizer state sharded over ranks.

Start with `strategy.py`; a block is wrapped in `wrapping.py`, by the policies of `wrap_policies.py`; `filling.py` loads weights into shards.
"""
