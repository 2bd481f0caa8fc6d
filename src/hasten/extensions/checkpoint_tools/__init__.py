"""`hasten ckpt` and `hasten data`: commands that read checkpoints.

Start with `inspect.py` (list, verify, compare, merge and convert); `torch_folder.py` reads folders of torch.distributed.checkpoint, and
`saved_batches.py` finds the samples of a saved run's batch.
"""
