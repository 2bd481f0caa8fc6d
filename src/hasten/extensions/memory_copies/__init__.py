"""`checkpoint_in_memory`: the newest state of a run in the memory of its machines.

Start with `part.py`, which copies the state and fetches it after a failure; `memory_folder.py` chooses the step to resume from.
"""
