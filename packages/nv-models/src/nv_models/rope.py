"""Rotary position embedding: frequencies of every supported scaling, and cosines and sines.

All numbers are computed in fp32 with the operations in transformers' order, so that both agree to
the last bit where the maths library does. This file knows no layers; `layers/rotary.py` holds the
table on the device.

`dynamic` is the one scaling whose frequencies depend on how long the sequence is at the moment a
token is computed; see `dynamic_inverse_frequencies`.

Sources: RoFormer (arXiv:2104.09864); linear scaling (arXiv:2306.15595); YaRN (arXiv:2309.00071);
dynamic NTK and llama3 as transformers computes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from nv_core.errors import ConfigError
from nv_models.config_values import ConfigValues
from nv_models.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]

ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "yarn", "llama3")

# Far beyond any model; what is computed with such numbers stays in the range of fp32.
_MAX_NUMBER = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions turn into angles.

    Args:
        theta: Base of the frequencies: pair i of a head turns by `theta ** (-2 * i / head_dim)`
            radians per position.
        rope_type: Which scaling changes these frequencies.
        factor: Strength of the scaling; 1 changes nothing.
        original_max_position_embeddings: Length in tokens that the model was trained for before the
            scaling. Read by `dynamic`, `yarn` and `llama3`.
        attention_factor: Multiplies every cosine and sine (`yarn`); 1 otherwise.
        beta_fast: `yarn`: pairs that turn at least this often within the original length keep their
            frequency.
        beta_slow: `yarn`: pairs that turn at most this often are slowed down by `factor`.
        truncate: `yarn`: whether the border between the two is rounded to whole pairs.
        low_freq_factor: `llama3`: wavelengths above original length / this are slowed down.
        high_freq_factor: `llama3`: wavelengths below original length / this stay.
        frequency_divisors: Divides the frequency of each pair, [head_dim / 2]; how GGUF files carry
            llama3 scaling. Only with `rope_type` "default".

    Raises:
        ConfigError: A value is out of range, or a scaling lacks what it needs.
    """

    theta: float = 10000.0
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    frequency_divisors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not 1 < self.theta <= _MAX_NUMBER:
            raise ConfigError(
                f"rope theta must be above 1 and at most {_MAX_NUMBER:g}, got {self.theta!r}"
            )
        for name in (
            "factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "low_freq_factor",
            "high_freq_factor",
        ):
            value = getattr(self, name)
            if not 1 / _MAX_NUMBER <= value <= _MAX_NUMBER:
                raise ConfigError(
                    f"rope {name} must be positive, from {1 / _MAX_NUMBER:g} to {_MAX_NUMBER:g}, "
                    f"got {value!r}"
                )
        if self.rope_type in ("dynamic", "yarn", "llama3"):
            length = self.original_max_position_embeddings
            if length is None or length < 1:
                raise ConfigError(
                    f"rope_type {self.rope_type!r} needs original_max_position_embeddings of at "
                    f"least 1, got {length!r}"
                )
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope high_freq_factor ({self.high_freq_factor}) must be above low_freq_factor "
                f"({self.low_freq_factor})"
            )
        if self.frequency_divisors is not None and self.rope_type != "default":
            raise ConfigError(
                f"rope frequency_divisors go only with rope_type 'default', got {self.rope_type!r}"
            )

    def longest_len(self, max_position_embeddings: int) -> int:
        """Returns the length in tokens that the scaling stretches a model to.

        Models declare `max_position_embeddings` before or after their scaling; where that cannot
        be told, before is assumed.

        Args:
            max_position_embeddings: What the model declares.
        """
        if self.rope_type in ("linear", "dynamic"):
            return max(max_position_embeddings, int(max_position_embeddings * self.factor))
        if self.rope_type == "yarn" and self.original_max_position_embeddings is not None:
            stretched = int(self.original_max_position_embeddings * self.factor)
            return max(max_position_embeddings, stretched)
        return max_position_embeddings

    def depends_on_length(self, num_positions: int) -> bool:
        """Whether a token's angles depend on its sequence's length, up to `num_positions` tokens.

        True only for `dynamic` beyond its original length. Keys and values are then no longer a
        function of the tokens before them: they also depend on how long the sequence was in the
        step that computed them, so blocks of different sequences must not be shared.
        """
        if self.rope_type != "dynamic" or self.original_max_position_embeddings is None:
            return False
        return num_positions > self.original_max_position_embeddings


def read_rope_config(
    raw: Mapping[str, Any], *, max_position_embeddings: int, source: str
) -> RopeConfig:
    """Reads the rotary settings of a config.json, in the old or the new spelling.

    Old: `rope_theta` beside `rope_scaling` (with `type` or `rope_type`). New: all of it in
    `rope_parameters`. Values within the mapping win over those beside it, and `rope_scaling` over
    `rope_parameters`, as in transformers.

    Args:
        raw: The whole config.json.
        max_position_embeddings: Its field of that name; the length that scalings refer to when
            they do not name one.
        source: Where the config came from, for messages.

    Raises:
        UnsupportedModelError: Another scaling, partial rotation, or settings that differ per layer.
        ConfigError: A value is missing or out of range.
    """
    outer = ConfigValues(raw, source)
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    mapping = outer.mapping(name)
    if "full_attention" in mapping:
        # Written by transformers for models whose layers differ; here all layers are the same.
        mapping = ConfigValues(mapping, f"{name} in {source}").mapping("full_attention")
    values = ConfigValues(mapping, f"{name} in {source}")
    partial = values.number("partial_rotary_factor", outer.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModelError(
            f"partial rotary embedding is not supported (partial_rotary_factor = {partial} in "
            f"{source}; only 1.0 is)"
        )
    rope_type = values.text("rope_type", values.text("type", "default"))
    theta = values.number("rope_theta", outer.number("rope_theta", 10000.0))
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == "linear":
        return RopeConfig(theta=theta, rope_type="linear", factor=values.number("factor"))
    if rope_type == "dynamic":
        return RopeConfig(
            theta=theta,
            rope_type="dynamic",
            factor=values.number("factor"),
            original_max_position_embeddings=max_position_embeddings,
        )
    original = outer.integer(
        "original_max_position_embeddings",
        values.integer("original_max_position_embeddings", max_position_embeddings),
    )
    if rope_type == "yarn":
        return _read_yarn(values, theta, original, max_position_embeddings)
    if rope_type == "llama3":
        return RopeConfig(
            theta=theta,
            rope_type="llama3",
            factor=values.number("factor"),
            original_max_position_embeddings=original,
            low_freq_factor=values.number("low_freq_factor"),
            high_freq_factor=values.number("high_freq_factor"),
        )
    raise UnsupportedModelError(
        f"rope_type {rope_type!r} in {source} is not supported; "
        f"supported are {', '.join(ROPE_TYPES)}"
    )


def _read_yarn(
    values: ConfigValues, theta: float, original: int, max_position_embeddings: int
) -> RopeConfig:
    # An original length below 1 is refused by RopeConfig, whatever the factor is.
    factor = values.number("factor", max_position_embeddings / max(original, 1))
    mscale = values.number("mscale", 0.0)
    mscale_all_dim = values.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        inferred = yarn_attention_factor(factor, mscale) / yarn_attention_factor(
            factor, mscale_all_dim
        )
    else:
        inferred = yarn_attention_factor(factor)
    return RopeConfig(
        theta=theta,
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=values.number("attention_factor", inferred),
        beta_fast=values.number("beta_fast", 0.0) or 32.0,
        beta_slow=values.number("beta_slow", 0.0) or 1.0,
        truncate=values.boolean("truncate", default=True),
    )


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Returns the factor on cosines and sines that YaRN recommends for a scaling by `factor`.

    Source: arXiv:2309.00071, equation 22; `mscale` weighs the logarithm, as DeepSeek models do.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Computes how far each pair of a head's dimensions turns per position.

    For `dynamic` these are the frequencies up to the original length.

    Args:
        rope: The rotary settings.
        head_dim: Size of a head, even.

    Returns:
        Radians per position, [head_dim // 2] fp32 on the CPU.
    """
    frequencies = 1.0 / _wavelength_powers(rope.theta, head_dim)
    if rope.frequency_divisors is not None:
        return frequencies / _divisors(rope.frequency_divisors, head_dim)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "yarn":
        return _yarn_frequencies(rope, head_dim)
    if rope.rope_type == "llama3":
        return _llama3_frequencies(rope, frequencies)
    return frequencies


def dynamic_inverse_frequencies(rope: RopeConfig, head_dim: int, lengths: Tensor) -> Tensor:
    """Computes the frequencies of `dynamic` scaling for sequences of given lengths.

    Up to the original length nothing is scaled. Beyond it, the base grows with the length of the
    sequence *in the step that computes a token*: a prompt run in one go gets one set of frequencies
    for all of its tokens, and every token decoded later gets its own, while keys in the cache keep
    theirs. That is what transformers does with one sequence, and the model does it per sequence of
    a batch (transformers takes the longest one of the batch for all of it, and does not shrink
    again before a shorter step than the original length). It follows that beyond the original
    length the cutting of a prompt into chunks changes the result; `RopeConfig.depends_on_length`
    tells when.

    Args:
        rope: Rotary settings of type `dynamic`.
        head_dim: Size of a head, even and above 2.
        lengths: Length in tokens of each token's sequence, [num_tokens], any integer dtype.

    Returns:
        Radians per position, [num_tokens, head_dim // 2] fp32 on the device of `lengths`.

    Raises:
        ConfigError: `head_dim` is 2, for which the method is not defined.
    """
    if head_dim <= 2:
        raise ConfigError(f"rope_type 'dynamic' needs a head_dim above 2, got {head_dim}")
    original = rope.original_max_position_embeddings or 1
    exponent = head_dim / (head_dim - 2)
    # Below 1 for lengths that are not scaled; the clamp keeps the power defined for them.
    stretch = (rope.factor * lengths / original - (rope.factor - 1)).clamp_min(1.0)
    bases = rope.theta * stretch**exponent
    powers = torch.arange(0, head_dim, 2, dtype=torch.float32, device=lengths.device) / head_dim
    scaled = 1.0 / bases.unsqueeze(-1) ** powers
    unscaled = inverse_frequencies(rope, head_dim).to(lengths.device)
    return torch.where((lengths > original).unsqueeze(-1), scaled, unscaled)


def cos_sin_table(frequencies: Tensor, positions: Tensor, *, attention_factor: float) -> Tensor:
    """Computes the cosines and sines of positions.

    Args:
        frequencies: Radians per position, [head_dim // 2] or one row for each position, fp32.
        positions: [num_positions], any integer dtype.
        attention_factor: Multiplies every entry.

    Returns:
        [num_positions, head_dim] fp32: the cosines of all pairs, then their sines.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor


def _wavelength_powers(theta: float, head_dim: int) -> Tensor:
    return theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _divisors(divisors: tuple[float, ...], head_dim: int) -> Tensor:
    if len(divisors) != head_dim // 2:
        raise ConfigError(
            f"rope frequency_divisors must hold head_dim / 2 = {head_dim // 2} numbers, "
            f"got {len(divisors)}"
        )
    return torch.tensor(divisors, dtype=torch.float32)


def _yarn_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Blends kept and slowed-down frequencies; arXiv:2309.00071, section 3.2."""
    powers = _wavelength_powers(rope.theta, head_dim)
    original = rope.original_max_position_embeddings or 1

    def pair_that_turns(times: float) -> float:
        return (head_dim * math.log(original / (times * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _llama3_frequencies(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Slows down long wavelengths, keeps short ones, and blends in between."""
    original = rope.original_max_position_embeddings or 1
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    slowed = torch.where(wavelengths > original / low, frequencies / rope.factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * slowed / rope.factor + smooth * slowed
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, blended, slowed)
