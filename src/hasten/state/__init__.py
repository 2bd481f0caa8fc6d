"""State of a run: collected by `save_state`, restored by `load_state`, down to the sample and the random states.

Start with `saving.py` (both calls), then `run_state.py` (collects) and `restore.py` (checks everything, then changes
it); `previous_state.py` restores the run after a failed load. `preemption.py` detects preemption of the machine.
"""
