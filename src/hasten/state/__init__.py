"""State of a run: collected by `save_state`, restored by `load_state`, down to the sample and the random states.

Start with `saving.py` (both calls), then `run_state.py` (collects) and `restore.py` (checks everything, then changes
it). `loop_position.py` holds what a save inside an accumulation window stores. `preemption.py` detects preemption of the machine.
"""
