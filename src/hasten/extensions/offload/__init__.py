"""Offload of training state to host memory on one device and under FSDP2 (`offload="optimizer"`, `"parameters"` or `"all"`).

`pieces` divides an optimizer's state and holds its host memory, `memory_budget` limits the device memory for pieces on their way, and `update`
is the optimizer step that streams pieces to the device and back. Start reading at `update`.
"""
