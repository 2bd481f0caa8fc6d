"""Storage of checkpoints: local folders and remote stores, drafts, locks, retention.

Start with `local_store.py`: drafts, and `LocalDraft.commit`, which makes one visible by one rename; `locks.py` excludes other writers,
`folder_replacement.py` replaces a folder that exists, `remote_store.py` writes to object stores, `retention.py` decides which checkpoints are deleted, `disk.py` holds every system call of a save.
"""
