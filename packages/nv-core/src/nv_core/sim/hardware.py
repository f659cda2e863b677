"""Hardware: what a GPU can do, and how much of that real kernels reach."""

from __future__ import annotations

from dataclasses import dataclass, fields

from nv_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One GPU.

    Attributes:
        name: What it is called.
        flops_per_s: Dense bfloat16 peak of its data sheet.
        bytes_per_s: Memory bandwidth of its data sheet.
        memory_bytes: Memory that a process can see.
        flops_share: Share of `flops_per_s` that matrix products reach.
        bytes_share: Share of `bytes_per_s` at which they read weights.
        kv_share: Share of `bytes_per_s` at which decodes read the KV cache.
        attention_share: Share of `flops_per_s` that attention over prompts reaches.
        norm: Exponent that blends the two limits of matrix products: 1 adds them up, infinity takes
            the greater one.
        layer_overhead_s: Fixed cost of a layer.
        step_overhead_s: Fixed cost of a step.
        seq_overhead_s: Cost of each sequence in a step.
        link_bytes_per_s: Bandwidth to the other GPUs of one host, one way; 0 if there is none.
        converts_fp8: Whether it converts fp8, as GPUs do from compute capability 8.9 on.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: int
    flops_share: float
    bytes_share: float
    kv_share: float
    attention_share: float
    norm: float
    layer_overhead_s: float
    step_overhead_s: float = 0.0
    seq_overhead_s: float = 0.0
    link_bytes_per_s: float = 0.0
    converts_fp8: bool = True

    def __post_init__(self) -> None:
        """Checks every number."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "converts_fp8"):
                continue
            least = 1 if field.name == "norm" else 0
            is_limit = not field.name.endswith("overhead_s") and field.name != "link_bytes_per_s"
            if not isinstance(value, (int, float)) or value < least or (is_limit and value == 0):
                raise ConfigError(f"{field.name} must be a positive number, got {value!r}")


HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        Hardware(
            name="a100",
            flops_per_s=312e12,
            bytes_per_s=2.039e12,
            memory_bytes=79 * 2**30,
            flops_share=0.65,
            bytes_share=0.80,
            kv_share=0.75,
            attention_share=0.45,
            norm=1.5,
            layer_overhead_s=38e-6,
            link_bytes_per_s=300e9,
            converts_fp8=False,
        ),
        Hardware(
            name="h100",
            flops_per_s=989e12,
            bytes_per_s=3.35e12,
            memory_bytes=79 * 2**30,
            flops_share=0.61,
            bytes_share=0.89,
            kv_share=0.75,
            attention_share=0.45,
            norm=1.44,
            layer_overhead_s=33e-6,
            link_bytes_per_s=450e9,
        ),
        Hardware(
            name="h200",
            flops_per_s=989e12,
            bytes_per_s=4.8e12,
            memory_bytes=139 * 2**30,
            flops_share=0.49,
            bytes_share=0.90,
            kv_share=0.85,
            attention_share=0.43,
            norm=1.0,
            layer_overhead_s=28e-6,
            seq_overhead_s=0.4e-6,
            link_bytes_per_s=450e9,
        ),
    )
}
"""GPUs by name. `flops_share`, `bytes_share`, `norm` and `layer_overhead_s` of the A100 and the
H100 are fitted to published profiles of matrix products (3 to 10 % mean error); their other shares
are assumed. The H200's are fitted to a log of this engine with Qwen3-0.6B, its `bytes_share`
measured apart (weights are read at 4.4 TB/s); docs/simulator.md says how well that predicts, and
how to fit your own."""


def find_hardware(name: str) -> Hardware:
    """Returns the GPU of that name.

    Raises:
        ConfigError: There is none.
    """
    if name.lower() not in HARDWARE:
        raise ConfigError(f"gpu must be one of {', '.join(HARDWARE)}, got {name!r}")
    return HARDWARE[name.lower()]
