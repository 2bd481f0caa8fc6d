"""Storage of checkpoints: local folders and remote stores.

Start with `local_store.py`: drafts, and `LocalDraft.commit`, which makes one visible by one rename; `drafts.py` holds the locks, removes
leftovers and replaces the content of a folder that exists; `remote_store.py` writes to object stores, `disk.py` holds every system call.
"""
