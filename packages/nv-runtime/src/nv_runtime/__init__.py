"""The engine: LLM, paged KV pool, model runner, sampler, tokenizer and the `nv` command."""

__version__ = "0.1.0"
