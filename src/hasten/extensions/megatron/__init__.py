"""Megatron-LM: models of transformers on megatron-core's layers and schedules.

Start with `strategy.py`; `families.py`, `config.py` and `shard_plan.py` (pure) translate a model, `weights.py` converts its weights, `engine.py` builds
the engine.
"""
