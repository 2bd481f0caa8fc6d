"""`hasten migrate`: the diff that moves a script from Hugging Face Accelerate. Start with `migrating.py`."""
