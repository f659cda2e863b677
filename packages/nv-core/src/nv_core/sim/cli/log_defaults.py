"""What a simulation takes from the log that `--fit-log` names, besides the times of its steps.

The log's header says under which limits, policy and model the steps were run. Each of them is the
default in place of the option's own, so that the simulation is one of the same machine; what the
user gave goes first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from nv_core.policies import SHIPPED_POLICIES
from nv_core.sim.model_shape import ModelShape
from nv_core.step_log import LogHeader

_LIMITS = {
    "block_size": "block_size",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_model_len": "max_model_len",
    "prefix_caching": "enable_prefix_caching",
    "steps_ahead": "num_steps_ahead",
}
"""Fields of the header by the option that they stand for."""

_MACHINE = ("model", "kv_cache_dtype", "gpu", "tensor_parallel_size")
"""Options that decide how many blocks there are; with one of them given, the log's pool is not."""


def take_defaults(
    options: Mapping[str, Any], header: LogHeader, given: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Puts what a log's header says in place of the options that were not given.

    Args:
        options: Values of the shared options by name.
        header: Of the log.
        given: Names of the options that the user gave.

    Returns:
        The options, the model's as a `ModelShape` if it is the log's; and what to tell the user, a
        line each.

    Raises:
        ConfigError: The header's model is none.
    """
    taken = {
        option: getattr(header, field) for option, field in _LIMITS.items() if option not in given
    }
    notes = []
    machine = [option for option in _MACHINE if option in given]
    if machine:
        names = ", ".join(machine)
        notes.append(f"the times are the log's all the same, whatever {names} was given")
    if not machine and "num_blocks" not in given:
        block_size = taken.get("block_size", options["block_size"])
        taken["num_blocks"] = header.num_blocks * header.block_size // block_size
    shape = ModelShape.from_header(header.model)
    if "model" not in given:
        if shape is None:
            notes.append(f"the log does not say its model; {options['model']} is assumed")
        else:
            taken["model"] = shape
    if "policy" not in given:
        if header.policy in SHIPPED_POLICIES:
            taken["policy"] = header.policy
        else:
            notes.append(
                f"the log's policy, {header.policy}, cannot be made from its name; "
                f"{options['policy']} is simulated, or what --policy names"
            )
    said = {name: getattr(value, "name", value) for name, value in taken.items()}
    listed = ", ".join(f"{name} {value}" for name, value in sorted(said.items()))
    return {**options, **taken}, [f"taken from the log: {listed or 'nothing'}", *notes]
