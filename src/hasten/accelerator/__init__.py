"""The Accelerator, the object that a training script uses, and its collaborators.

Start with `facade.py` (the public methods), then `setup.py` (construction) and `preparing.py` (`prepare()`).
`step.py`, `process.py` and `retrying.py` implement the methods of a training step.
"""
