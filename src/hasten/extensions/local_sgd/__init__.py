"""Local SGD: ranks train independently and average their parameters every few updates. Start with `local_sgd.py`."""
