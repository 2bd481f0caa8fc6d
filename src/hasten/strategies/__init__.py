"""Strategies that spread a model over processes: transforms that compose, or an engine that replaces the training step.

Start with `base.py` (the protocol), `choose.py` (from settings to a strategy) and `native.py` (torch's parallelisms, composed). Each parallelism
has a folder; engines are in `engines/`. `placing.py`, `recompute.py` and `compiling.py` hold transforms that all native strategies share,
`weight_sources.py` and `sharded_updates.py` the weights and updates of sharded models.

To add a strategy: a folder with `strategy.py` (a `DistributionTransform` for `NativeStrategy`, or under `engines/` a whole `Strategy`), a case in
`choose.py`, and its name in `StrategyName` (`config/root.py`); an engine with settings also in `config/checks.py`, `config/layers.py` and `launch/job.py`.
"""
