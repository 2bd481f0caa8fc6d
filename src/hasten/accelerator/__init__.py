"""The Accelerator: the object a training script uses, made of collaborators that each do one thing.

Start with `facade.py` (the public methods), then `setup.py` (what is built at construction) and `preparing.py` (what `prepare` does).
`accumulation.py`, `metrics.py`, `process.py` and `retrying.py` hold the methods of a step.
"""
