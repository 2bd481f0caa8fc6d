"""Checkpoints at URLs (s3://, gs://, memory://): `remote_store.py` writes the files of a version first and the manifest last."""
