"""Strategies that spread a model over processes: transforms that compose, or an engine that replaces the training step.

Start with `base.py` (the protocol), `choose.py` (from settings to a strategy) and `native.py` (torch's parallelisms, composed). Each parallelism
has a folder; engines are in `engines/`. `placing.py`, `recompute.py` and `compiling.py` hold transforms that all native strategies share,
`weight_sources.py` and `sharded_updates.py` the weights and updates of sharded models.

To add a strategy: a folder with `strategy.py` (a `Transform`, or a `DistributionTransform` if it wraps the model; under `engines/` a whole `Strategy`),
a case in `choose.py`, its name in `StrategyName` (`config/root.py`) and its folder in the contracts of `pyproject.toml`. For a package that it needs:
`_ENGINES` in `launch/job.py`. For settings: a class in `config/sections/`, a field in `config/root.py`, `ENGINES` in `config/checks.py`, `CHOSEN_BY` in
`config/layers.py` and an argument in `accelerator/facade.py`. For degrees of the mesh: `mesh_of` in `runtime/mesh_plan.py`.
"""
