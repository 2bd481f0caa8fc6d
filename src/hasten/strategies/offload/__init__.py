"""Offload of training state to host memory on one device and under FSDP2 (`offload="optimizer"`, `"parameters"` or `"all"`).

`lanes` holds the copy streams, `pieces` the division of an optimizer's state and its host memory, and `update` the optimizer step that
streams pieces to the device and back. Start reading at `update`.
"""
