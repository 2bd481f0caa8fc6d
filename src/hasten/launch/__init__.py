"""Process launchers: plans as data, executed through torch's elastic agent, srun, mpirun and others.

Read in the order of a launch: `job.py` (from settings to a plan), `shape.py` (machines and processes), `torchrun.py` (the usual launcher;
`targets.py` lists the others, in `cluster/` and in extensions), `run.py` (executes a plan), `elastic/agent.py` (supervises ranks), `worker.py` (first code of a rank).
`base.py` holds LaunchPlan, `failure.py` describes a failed job, `checkin.py` describes this machine to the others.
"""
