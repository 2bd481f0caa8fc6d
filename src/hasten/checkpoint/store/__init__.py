"""Storage of checkpoints: local folders and remote stores, drafts, locks, retention.

Start with `local_store.py`: drafts and how they become visible; `locks.py` excludes other writers,
`retention.py` decides which checkpoints are deleted, `disk.py` holds every system call of a save.
"""
