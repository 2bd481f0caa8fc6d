"""`hasten migrate`: a diff that ports a script from Hugging Face Accelerate. Start with `migrating.py`."""
