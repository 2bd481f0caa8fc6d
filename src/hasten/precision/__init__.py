"""Compute precision: full, autocast, loss scaling for fp16, and fp8.

Start with `base.py` (the protocol) and `build.py` (the factory); `autocast.py` (`scale`)
multiplies the loss by the scale of fp16, `scaler.py` unscales gradients, skips overflowed updates and adjusts the scale. The divisor of a loss in an
accumulation window is in `optim/clock.py` (`weigh`), the division in `optim/window.py`. Under DeepSpeed its strategy scales the loss (`backward`).
"""
