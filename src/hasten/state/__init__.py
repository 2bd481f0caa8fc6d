"""The state of a run: what `save_state` collects and `load_state` restores, down to the sample and the random states.

Start with `saving.py` (both calls), then `run_state.py` (collects) and `restore.py` (checks everything, then changes it); `undo.py` takes a failed
load back. `preemption.py` saves when the machine is taken away.
"""
