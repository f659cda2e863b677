"""Decoder models (Qwen3, Qwen2, Llama, Mistral) on nv-kernels, with checkpoint loading."""

__version__ = "0.1.0"
