"""The process: environment, topology, mesh, device, process group, seeds, logs.

Start with `env.py` (the only reader of variables), `topology.py` (which rank of how many), `mesh_plan.py` (axes, without torch) and `bootstrap.py`
(start and end of the process group). `context.py` is what every other room is given.
"""
