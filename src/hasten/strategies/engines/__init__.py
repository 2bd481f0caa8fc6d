"""Engines that replace the training step: DeepSpeed, Megatron-LM, torch_xla. Each folder starts with `strategy.py`."""
