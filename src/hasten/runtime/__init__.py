"""Process runtime: environment, topology, mesh, device, process group, seeds, logs.

Start with `env.py` (the only reader of environment variables), `topology.py` (rank and world size), `mesh_plan.py` (mesh axes, without
torch) and `bootstrap.py` (start and destruction of the process group). `context.py` holds the context passed to all other packages.
"""
