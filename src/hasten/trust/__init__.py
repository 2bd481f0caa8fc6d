"""Monitors of a run: stalls, diverging ranks, NaN and inf losses, and memory; one folder or file each."""
