"""Watchdog thread that reports which rank waits for which, at which line, and the reason.

Start with `watchdog.py`, then `diagnose.py` (pure: states to a cause) and `wording.py` (the report).
`status_server.py` answers `hasten top` and the other ranks.
"""
