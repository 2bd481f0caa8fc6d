"""Ranks watched from threads beside their training: reports of stalls, and `hasten top`.

Start with `part.py`. `watchdog.py` posts the state of this rank and reads those of all; `diagnose.py` (pure) finds the cause, `wording.py` writes the
report. `status_server.py` answers `command.py`, which is `hasten top`.
"""
