"""Operations on nested tensors, on one process and over all of them."""

from accelerate._impl.tensors import *
