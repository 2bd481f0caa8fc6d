"""DeepSpeed: ZeRO 0 to 3, offload to host memory and drives, checkpoints that reshard.

Start with `strategy.py`; `config.py` (pure) fills DeepSpeed's JSON, `engine.py` starts engines, `shards.py` describes
each ZeRO rank's slice of a tensor. Resharding is done by `checkpoint/reshard.py` (`plan_copies`), which fills these slices from any other layout.
"""
