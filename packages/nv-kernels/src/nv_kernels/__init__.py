"""LLM inference operators: a contract, a PyTorch reference and a Triton kernel for each."""

__version__ = "0.1.0"
