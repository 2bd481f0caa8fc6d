"""Storage of checkpoints in local folders, and the choice of the store of a path or URL.

Start with `local_store.py`: locks, drafts, and `LocalDraft.commit`, which makes one visible by one rename; `drafts.py` removes
leftovers and replaces the content of a folder that exists; `disk.py` holds every system call.
"""
