"""Process groups and collectives on nested tensors and objects; nothing here reads the environment.

Start with `base.py` (the Comm protocol), then `process_group.py` (torch groups, objects, a barrier that names missing ranks) and `ops.py` (trees).
`agreement.py` holds votes, `session.py` the authentication by the job's token.
"""
