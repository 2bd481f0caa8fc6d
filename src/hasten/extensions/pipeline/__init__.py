"""Pipeline parallelism: consecutive blocks on different ranks, micro-batches in a schedule.

Start with `strategy.py`; `stage_plan.py` (pure) and `cut.py` define the stages, `schedule.py` orders micro-batches, `passes.py` runs a stage.
"""
