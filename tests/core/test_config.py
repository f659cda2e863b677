"""SchedulerConfig refuses what cannot work, and says what would."""

import dataclasses
from typing import Any

import pytest

from nv_core import ConfigError, Mixed, Policy, PrefillFirst, Scheduler, SchedulerConfig, Step


def test_defaults() -> None:
    config = SchedulerConfig(num_blocks=64)
    assert (config.block_size, config.max_num_seqs, config.max_num_batched_tokens) == (
        16,
        256,
        8192,
    )
    assert config.max_model_len is None
    assert config.eos_token_ids == ()
    assert config.enable_prefix_caching is True
    assert config.policy == "mixed"


def test_documented_order_of_positional_arguments() -> None:
    config = SchedulerConfig(64, 8, 4, 32, 100, (2,), False, "prefill_first")  # noqa: FBT003
    assert config == SchedulerConfig(
        num_blocks=64,
        block_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=100,
        eos_token_ids=(2,),
        enable_prefix_caching=False,
        policy="prefill_first",
    )


@pytest.mark.parametrize("value", [0, -1, 1.0, "4", None, True])
@pytest.mark.parametrize(
    "name", ["num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"]
)
def test_counts_must_be_positive_integers(name: str, value: object) -> None:
    fields: dict[str, Any] = {"num_blocks": 4, name: value}
    with pytest.raises(ConfigError, match=f"{name} must be an integer of at least 1, got"):
        SchedulerConfig(**fields)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("num_blocks", 2**24),
        ("block_size", 2**31 - 1),
        ("max_num_seqs", 2**31 - 1),
        ("max_num_batched_tokens", 2**31 - 1),
        ("max_model_len", 2**31 - 1),
        ("vocab_size", 2**31 - 1),
    ],
)
def test_sizes_that_no_machine_has_are_refused(name: str, most: int) -> None:
    fields: dict[str, Any] = {"num_blocks": 4}
    assert getattr(SchedulerConfig(**{**fields, name: most}), name) == most
    for value in (most + 1, 10**20, 10**30):
        with pytest.raises(ConfigError, match=f"{name} must be at most {most}, got {value}; "):
            SchedulerConfig(**{**fields, name: value})


@pytest.mark.parametrize("name", ["max_model_len", "vocab_size"])
def test_optional_limits_may_be_none_but_not_zero(name: str) -> None:
    SchedulerConfig(num_blocks=4, **{name: None})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=name):
        SchedulerConfig(num_blocks=4, **{name: 0})  # type: ignore[arg-type]


def test_model_length_leaves_room_for_an_output_token() -> None:
    SchedulerConfig(num_blocks=4, max_model_len=2)
    with pytest.raises(ConfigError, match="max_model_len must be at least 2"):
        SchedulerConfig(num_blocks=4, max_model_len=1)


@pytest.mark.parametrize("ids", [[-1], ["2"], [True], [2.0], 2, "2", None])
def test_eos_token_ids_must_be_token_ids(ids: object) -> None:
    with pytest.raises(ConfigError, match="eos_token_ids"):
        SchedulerConfig(num_blocks=4, eos_token_ids=ids)  # type: ignore[arg-type]


def test_eos_token_ids_become_a_tuple() -> None:
    ids: Any = [2, 3]
    assert SchedulerConfig(num_blocks=4, eos_token_ids=ids).eos_token_ids == (2, 3)


def test_unknown_keyword_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="'max_num_sequences'; did you mean 'max_num_seqs'"):
        SchedulerConfig(num_blocks=4, max_num_sequences=3)  # type: ignore[call-arg]


def test_flags_must_be_bools() -> None:
    wrong: Any = "yes"
    with pytest.raises(ConfigError, match="enable_prefix_caching must be a bool, got 'yes'"):
        SchedulerConfig(num_blocks=4, enable_prefix_caching=wrong)


def test_frozen() -> None:
    config = SchedulerConfig(num_blocks=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_blocks = 5  # type: ignore[misc]


def test_unknown_policy_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match=r"mixed, .*, skip_ahead, or a Policy object, got 'fifo'"):
        SchedulerConfig(num_blocks=4, policy="fifo")


@pytest.mark.parametrize("policy", [object(), None, 3, Mixed])
def test_policy_must_be_an_object_with_schedule(policy: object) -> None:
    with pytest.raises(ConfigError, match=r"policy must be .* such as MyPolicy\(\)"):
        SchedulerConfig(num_blocks=4, policy=policy)  # type: ignore[arg-type]


class OwnPolicy:
    def schedule(self, step: Step) -> None:
        while seq := step.waiting.first():
            if not step.take(seq):
                break


def test_own_policy_object_is_the_one_that_schedules() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=4, policy=OwnPolicy()))
    seq = scheduler.add([1, 2, 3])
    plan = scheduler.schedule()
    assert plan is not None
    assert [entry.seq_id for entry in plan.sequences] == [seq.seq_id]


@pytest.mark.parametrize(
    ("policy", "keeps_copies"),
    [
        ("prefill_first", False),
        (PrefillFirst(), False),
        ("mixed", True),
        (Mixed(), True),
        (OwnPolicy(), True),
    ],
)
def test_copies_kept_by_default(policy: str | Policy, keeps_copies: bool) -> None:  # noqa: FBT001
    assert SchedulerConfig(num_blocks=4, policy=policy).keeps_copies is keeps_copies


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_copies_kept_by_choice(policy: str) -> None:
    def keeps_copies(findable_copies: str) -> bool:
        config = SchedulerConfig(num_blocks=4, policy=policy, findable_copies=findable_copies)
        return config.keeps_copies

    assert keeps_copies("all")
    assert not keeps_copies("newest")
    with pytest.raises(ConfigError, match="findable_copies must be 'all', 'newest' or None"):
        keeps_copies("some")
