"""`Accelerator.capture_step()`: a training step as one CUDA graph. Start with `captured_step.py`."""
