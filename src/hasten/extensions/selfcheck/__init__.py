"""`hasten test`: a check of collectives and of a short training under the settings of a machine. Start with `selfcheck.py`."""
