"""`hasten ckpt`: commands that read checkpoints.

Start with `inspect.py` (list, verify, compare, merge and convert); `torch_folder.py` reads folders of torch.distributed.checkpoint.
"""
