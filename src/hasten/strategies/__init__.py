"""Strategies that spread a model over processes: transforms that compose, or an engine that replaces the training step.

Start with `base.py` (the protocol), `choose.py` (from settings to a strategy) and `native.py` (torch's parallelisms, composed, and the transforms of a single process). Each parallelism
has a folder; engines are extensions. `recompute.py` and `compiling.py` hold transforms that all native strategies share,
`weight_sources.py` and `sharded_updates.py` the weights and updates of sharded models.

To add a parallelism of torch: a folder with `strategy.py` (a `Transform`, or a `DistributionTransform` if it wraps the model), a line in `choose.py`,
its folder in the contracts of `pyproject.toml` and its degree in `mesh_of` (`runtime/mesh_plan.py`). To add an engine: an extension whose
`strategies` table names an `OfferedStrategy` (`base.py`); `docs/extending.md` describes extensions.
"""
