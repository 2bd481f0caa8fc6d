"""`hasten tune`: short real runs of a script under other settings. Start with `tuning.py` (pure: what to try next), then `trial.py` (one run)."""
