"""The watchdog beside the training thread: which rank waits for which, where, and why.

Start with `watchdog.py`, then `diagnose.py` (pure: evidence to a cause) and `wording.py` (the report).
`status_server.py` answers `hasten top` and the other ranks.
"""
