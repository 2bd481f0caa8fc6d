"""Monitors of a run: NaN and inf losses, and memory. Stalls and diverging ranks are watched by extensions."""
