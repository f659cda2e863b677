"""Plain PyTorch implementations: the oracle of the Triton kernels and the CPU path.

Same signatures as the ops, less the `backend`; arguments are checked before they arrive here.
"""
