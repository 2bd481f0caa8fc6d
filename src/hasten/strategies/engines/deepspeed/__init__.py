"""DeepSpeed: ZeRO 0 to 3, offload to host memory and drives, checkpoints that reshard.

Start with `strategy.py`; `config.py` (pure) fills DeepSpeed's JSON, `engine.py` starts engines, `shards.py` maps each ZeRO rank to its slice.
"""
