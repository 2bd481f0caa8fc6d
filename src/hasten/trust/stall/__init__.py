"""Watchdog thread that reports which rank waits for which, at which line, and the reason.

Start with `watchdog.py`, then `diagnose.py` (pure: from the ranks' states to a cause, with its sentence and remedy, also for a rank that is busy) and `wording.py` (the report around these sentences).
The states that ranks post are defined in
`trust/divergence/state.py`. `status_server.py` answers `hasten top` and the other ranks.
"""
