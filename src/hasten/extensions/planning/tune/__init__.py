"""`hasten tune`: short real runs of a script under other settings. Start with `tuning.py` (pure), then `trial.py`."""
