"""Process launchers: plans as data, executed through torch's elastic agent, srun, mpirun and others.

Start with `choose.py` (settings to a plan) and `base.py` (LaunchPlan), then `run.py` (executes a plan) and the launchers, one file each.
`failure.py` describes a failed job; `report.py` describes this machine to the others.
"""
