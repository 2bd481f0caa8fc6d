"""Where checkpoints lie: local folders and remote stores, drafts, locks, retention.

Start with `local_store.py`; a draft becomes visible in `local_draft.py`. `writer_lock.py` and `ownership.py` keep two writers apart,
`retention.py` decides what is deleted, `disk.py` holds every system call of a save.
"""
