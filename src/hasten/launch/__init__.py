"""Starting processes: plans as data, carried out by torch's elastic agent, srun, mpirun and others.

Start with `choose.py` (settings to a plan) and `base.py` (LaunchPlan), then `run.py` (carries a plan out) and the launchers, one file each.
`report.py` and `verdict.py` word a failure.
"""
