"""Process groups and collectives on nested tensors and objects; nothing here reads the environment.

Start with `base.py` (the Comm protocol), then `process_group.py` (torch groups, objects, a barrier that names missing ranks) and `ops.py` (trees).
`agreement.py` holds votes, `encoding.py` the encoding of objects, which is never pickle.
"""
