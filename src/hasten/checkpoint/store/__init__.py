"""Storage of checkpoints: local folders and remote stores, drafts, locks, retention.

Start with `local_store.py`: drafts, and `LocalDraft.commit`, which makes one visible by one rename; `drafts.py` replaces the content of
a folder that exists and removes leftovers, `locks.py` holds the two locks, `remote_store.py` writes to object stores, `retention.py`
decides which checkpoints are deleted, `disk.py` holds every system call of a save.
"""
