"""A pure-Python continuous-batching scheduler core: sequences, paged KV blocks, exact prefix caching."""

__version__ = "0.1.0"
