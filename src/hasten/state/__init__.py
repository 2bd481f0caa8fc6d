"""State of a run: collected by `save_state` and restored by `load_state`, including the sample position and random states.

Start with `saving.py` (both calls), then `run_state.py` (collects) and `restore.py` (checks everything, then changes it); `undo.py`
rolls back a failed load. `preemption.py` detects preemption of the machine.
"""
