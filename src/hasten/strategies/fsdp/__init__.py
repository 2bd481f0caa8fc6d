"""FSDP2 and hybrid sharding: parameters, gradients and optimizer state sharded over ranks.

Start with `strategy.py` (`_shard` calls `fully_shard` on each block); `shard_groups.py` chooses the modules that are sharded as a group, `resharding.py` frees what evaluations gather, `gradients.py` reads the gradients that FSDP2 holds inside a window.
"""
