"""Tools for testing distributed code: a pool of warm workers on gloo, and a pytest plugin.

Start with `pool.py` (`@ranks(2)`) and `plugin.py`.
"""
