"""Local SGD."""

from hasten.extensions.local_sgd.local_sgd import LocalSGD as LocalSGD
