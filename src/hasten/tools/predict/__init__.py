"""`hasten predict`: a model over all rows of a file, on all processes, in order. Start with `predict.py`."""
