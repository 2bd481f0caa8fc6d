"""Megatron-LM: models of transformers on megatron-core's layers and schedules.

Start with `strategy.py`; `families.py`, `config.py` and `layout.py` (pure) translate a model, `weights.py` moves its numbers, `engine.py` trains.
"""
