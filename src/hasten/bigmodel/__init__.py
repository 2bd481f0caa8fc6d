"""Models larger than the device: meta tensors, device maps, weights streamed from host memory or files, loading.

Start with `dispatch.py` (places a model), then `device_map.py` with `solver.py` (choose a device for each module), `stream.py` (copies
weights ahead of the forward) and `load.py` (reads checkpoints into placed models).
"""
