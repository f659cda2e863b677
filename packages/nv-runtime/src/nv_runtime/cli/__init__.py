"""The `nv` command: generate text, chat, and see what a model needs.

Read `entry.py` first (the command and its errors), then `generate.py`, `chat.py` and `info.py`, one
command each; `options.py` and `answer.py` are what they share. Modules here import nothing heavy at
the top, so that `nv --help` answers at once. They use the engine through `nv_runtime.LLM` alone.
"""

from nv_runtime.cli.entry import main

__all__ = ["main"]
