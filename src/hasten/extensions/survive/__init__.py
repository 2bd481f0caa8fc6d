"""Runs that continue when replicas are lost.

In a rank: `part.py` (the part of the run), `replica.py`, `ledger_plan.py` and `roles_plan.py` (pure). In the launcher: `launch_target.py`, `crew.py`, and
`replica_machines.py` for several machines. `folder.py` names the files by which both tell each other of the run.
"""
