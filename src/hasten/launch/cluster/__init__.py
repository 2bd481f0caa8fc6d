"""Launchers of a cluster: one file for each, which turns a request into a plan; `job.py` chooses among them.

Start with `slurm.py` (srun and batch scripts) or `mpi.py`.
"""
