"""Local SGD."""

from hasten.optim.local_sgd import LocalSGD as LocalSGD
