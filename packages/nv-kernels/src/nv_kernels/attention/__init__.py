"""Attention backends: what they promise, which exist, and which one to take.

`backend.py` is the protocol, `registry.py` the choice; each `*_backend.py` says what it can
compute and hands over to its kernel.
"""
