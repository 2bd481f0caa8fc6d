"""Replicas that may be lost while the run continues: coordination by torchft, exchange of gradients, account of samples, healing.

Start with `replica.py`; `inside.py` connects the ranks of one replica; `ledger_plan.py` and `roles_plan.py` (pure) hold the decisions that all replicas make alike.
"""
