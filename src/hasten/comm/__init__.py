"""Process groups and collectives on nested tensors and objects; nothing here reads the environment.

Start with `base.py` (the Comm protocol), then `process_group.py` (torch groups), `ops.py` (trees) and `objects.py`.
`agreement.py` holds votes, `barrier.py` a barrier that names missing ranks, `session.py` the authentication by the job's token.
"""
