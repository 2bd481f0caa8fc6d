"""Storage of checkpoints: local folders and remote stores, drafts, locks, retention.

Start with `local_store.py`; `local_draft.py` makes a draft visible, `writer_lock.py` and `locks.py` exclude other writers,
`retention.py` decides which checkpoints are deleted, `disk.py` holds every system call of a save.
"""
