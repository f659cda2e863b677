"""Tensor parallelism: what each rank holds, and that all ranks together compute the same."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from safetensors.torch import load_file

from nv_core.errors import ConfigError
from nv_models import CausalLM, ModelConfig, TensorParallel
from nv_models.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from nv_models.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from nv_models.layers.norm import RMSNorm
from nv_models.layers.placement import Placement
from nv_models.parallel import check_tensor_parallel_size, heads_per_rank
from paged_runner import PagedRunner, load_paged_model, make_backend
from rank_processes import RankCase, run_ranks
from tiny_checkpoints import (
    TinySpec,
    load_reference,
    make_config,
    reference_logits,
    write_checkpoint,
)
from tiny_gguf import write_gguf

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from nv_models.weight_target import TensorTarget


def rank_of(rank: int, size: int) -> TensorParallel:
    """A rank whose group is never used: only what it holds is looked at."""
    group = cast("torch.distributed.ProcessGroup", object())
    return TensorParallel(rank, size, group)


def placed(rank: int = 0, size: int = 1) -> Placement:
    tensor_parallel = TensorParallel() if size == 1 else rank_of(rank, size)
    return Placement(
        device=torch.device("cpu"), dtype=torch.float32, tensor_parallel=tensor_parallel
    )


def fill(targets: Iterable[TensorTarget], stored: dict[str, torch.Tensor]) -> None:
    for target in targets:
        assert stored[target.name].shape == target.shape
        target.region.zero_()
        rows = tuple(slice(*bounds) for bounds in target.source)
        target.filled_region.copy_(stored[target.name][rows])


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


class TestShares:
    def test_replicated(self) -> None:
        stored = {"p.weight": numbered(6, 4), "p.bias": numbered(6)}
        for rank in range(2):
            layer = ReplicatedLinear(4, 6, bias=True, placement=placed(rank, 2))
            fill(layer.targets("p"), stored)
            assert torch.equal(layer.weight, stored["p.weight"])
            assert layer.bias is not None
            assert torch.equal(layer.bias, stored["p.bias"])

    def test_column(self) -> None:
        stored = {"p.weight": numbered(6, 4), "p.bias": numbered(6)}
        for rank in range(3):
            layer = ColumnParallelLinear(4, 6, bias=True, placement=placed(rank, 3))
            fill(layer.targets("p"), stored)
            rows = slice(2 * rank, 2 * rank + 2)
            assert torch.equal(layer.weight, stored["p.weight"][rows])
            assert layer.bias is not None
            assert torch.equal(layer.bias, stored["p.bias"][rows])

    def test_merged_column_keeps_the_projections_apart(self) -> None:
        stored = {"gate.weight": numbered(4, 3), "up.weight": 100 + numbered(6, 3)}
        for rank in range(2):
            layer = MergedColumnParallelLinear(3, [4, 6], bias=False, placement=placed(rank, 2))
            fill(layer.targets("gate", "up"), stored)
            gate = stored["gate.weight"][2 * rank : 2 * rank + 2]
            up = stored["up.weight"][3 * rank : 3 * rank + 3]
            assert torch.equal(layer.weight, torch.cat((gate, up)))

    def test_row_keeps_the_bias_whole(self) -> None:
        stored = {"p.weight": numbered(3, 8), "p.bias": numbered(3)}
        for rank in range(4):
            layer = RowParallelLinear(8, 3, bias=True, placement=placed(rank, 4))
            fill(layer.targets("p"), stored)
            assert torch.equal(layer.weight, stored["p.weight"][:, 2 * rank : 2 * rank + 2])
            assert layer.bias is not None
            assert torch.equal(layer.bias, stored["p.bias"])

    @pytest.mark.parametrize(
        ("num_kv_heads", "size", "kv_heads_of_ranks"),
        [
            (4, 2, [(0, 1), (2, 3)]),
            (2, 2, [(0,), (1,)]),
            (2, 4, [(0,), (0,), (1,), (1,)]),
            (1, 4, [(0,), (0,), (0,), (0,)]),
            (4, 8, [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]),
        ],
    )
    def test_qkv_by_heads(
        self, num_kv_heads: int, size: int, kv_heads_of_ranks: list[tuple[int, ...]]
    ) -> None:
        head_dim, num_heads = 2, 8
        stored = {
            "q.weight": numbered(num_heads * head_dim, 3),
            "k.weight": 1000 + numbered(num_kv_heads * head_dim, 3),
            "v.weight": 2000 + numbered(num_kv_heads * head_dim, 3),
            "q.bias": numbered(num_heads * head_dim),
            "k.bias": 1000 + numbered(num_kv_heads * head_dim),
            "v.bias": 2000 + numbered(num_kv_heads * head_dim),
        }

        def heads(name: str, which: Iterable[int]) -> torch.Tensor:
            return torch.cat([stored[name][h * head_dim : (h + 1) * head_dim] for h in which])

        for rank, kv_heads in enumerate(kv_heads_of_ranks):
            layer = QKVParallelLinear(
                3, head_dim, num_heads, num_kv_heads, bias=True, placement=placed(rank, size)
            )
            fill(layer.targets("q", "k", "v"), stored)
            assert (layer.num_heads, layer.num_kv_heads) == (num_heads // size, len(kv_heads))
            q_heads = range(rank * layer.num_heads, (rank + 1) * layer.num_heads)
            # Each query head finds the key head of its group on its own rank.
            group = num_heads // num_kv_heads
            per_kv_head = layer.num_heads // layer.num_kv_heads
            for local, q_head in enumerate(q_heads):
                assert kv_heads[local // per_kv_head] == q_head // group
            for kind, parameter in (("weight", layer.weight), ("bias", layer.bias)):
                expected = torch.cat(
                    (
                        heads(f"q.{kind}", q_heads),
                        heads(f"k.{kind}", kv_heads),
                        heads(f"v.{kind}", kv_heads),
                    )
                )
                assert parameter is not None
                assert torch.equal(parameter, expected)

    @pytest.mark.parametrize(
        ("vocab_size", "size", "num_tokens"),
        [(64, 2, [32, 32]), (40, 2, [32, 8]), (131, 4, [48, 48, 35, 0]), (5, 4, [5, 0, 0, 0])],
    )
    def test_vocabulary_is_padded_with_zeros(
        self, vocab_size: int, size: int, num_tokens: list[int]
    ) -> None:
        stored = {"e.weight": 1 + numbered(vocab_size, 3)}
        rows = []
        for rank in range(size):
            layer = VocabParallelEmbedding(vocab_size, 3, placement=placed(rank, size))
            layer.weight.fill_(torch.nan)
            fill(layer.targets("e"), stored)
            assert layer.num_tokens == num_tokens[rank]
            assert (layer.weight[num_tokens[rank] :] == 0).all()
            rows.append(layer.weight[: num_tokens[rank]])
        assert torch.equal(torch.cat(rows), stored["e.weight"])

    def test_ranks_do_not_read_each_others_share(self, tmp_path: Path) -> None:
        """The parts of one tensor over the ranks cover it without overlap, but for KV heads."""
        path = write_checkpoint(tmp_path, TinySpec(family="llama", attention_bias=True))
        config = ModelConfig.from_pretrained(path)
        stored = load_file(path / "model.safetensors")
        seen = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}
        for rank in range(2):
            model = CausalLM(
                config,
                device="meta",
                dtype=torch.float32,
                attention_backend=make_backend(config),
                tensor_parallel=rank_of(rank, 2),
            )
            for target in model.targets():
                seen[target.name][tuple(slice(*bounds) for bounds in target.source)] += 1
        for name, count in seen.items():
            replicated = "norm" in name or name.endswith("o_proj.bias")
            assert (count == (2 if replicated else 1)).all(), name


class TestSingleRank:
    def test_no_process_group_is_touched(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any, **__: Any) -> None:  # noqa: ANN401 - stands for any function
            raise AssertionError("a single rank called torch.distributed")

        for name in ("all_reduce", "broadcast", "get_rank", "get_world_size"):
            monkeypatch.setattr(torch.distributed, name, fail)
        monkeypatch.setattr("nv_models.parallel._all_gather", fail)
        path = write_checkpoint(tmp_path)
        assert PagedRunner(load_paged_model(path)).prompt_logits([1, 2, 3]).isfinite().all()

    def test_collectives_return_their_argument(self) -> None:
        part = torch.ones(2, 3)
        alone = TensorParallel()
        assert alone.all_gather_last_dim(part) is part
        assert alone.all_reduce(part) is part
        assert alone.all_reduce_max(part) is part
        assert alone.broadcast(part) is part


@pytest.mark.parametrize("num_parts", [1, 3])
def test_the_parts_of_a_product_are_added_before_those_of_the_ranks(
    num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums: list[torch.Tensor] = []

    def all_reduce(partial: torch.Tensor, **_: object) -> None:
        sums.append(partial.clone())
        partial *= 2  # as if the other rank had the same

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    norm = RMSNorm(8, eps=1e-6, placement=placed(0, 2))
    norm.weight.data.copy_(torch.linspace(0.5, 2, 8))
    parts = torch.randn(num_parts, 5, 8, generator=torch.Generator().manual_seed(0))
    residual = torch.ones(5, 8)
    expected = parts.sum(0)
    normed, total = norm.add_and_normalise(parts, residual)
    torch.testing.assert_close(sums, [expected])
    torch.testing.assert_close(total, residual + 2 * expected)
    torch.testing.assert_close(normed, norm(total))


def test_joining_the_columns_of_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nv_models.parallel._all_gather", lambda parts, moved, group: None)
    joined = rank_of(1, 3).all_gather_last_dim(torch.empty(0, 5))
    assert joined.shape == (0, 15)


class TestRefused:
    @pytest.mark.parametrize(
        ("rank", "size", "message"),
        [
            (0, 0, "size must be at least 1, got 0"),
            (2, 2, "rank must be from 0 to size - 1 = 1, got 2"),
            (-1, 1, "rank must be from 0"),
            (0, 2, "size 2 needs a process group"),
        ],
    )
    def test_ranks(self, rank: int, size: int, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            TensorParallel(rank, size)

    def test_every_count_that_does_not_divide_is_named(self) -> None:
        spec = TinySpec(num_heads=6, num_kv_heads=2, intermediate_size=90)
        config = ModelConfig.from_dict(
            {**make_config(spec).to_dict(), "architectures": ["Qwen3ForCausalLM"]}
        )
        for size in (1, 2, 6):
            check_tensor_parallel_size(config, size)
        with pytest.raises(ConfigError) as caught:
            check_tensor_parallel_size(config, 4)
        message = str(caught.value)
        assert "size 4 does not fit" in message
        assert "num_attention_heads = 6 is not a multiple" in message
        assert "intermediate_size = 90 is not a multiple" in message
        assert "num_key_value_heads" not in message  # 4 ranks can share 2 heads
        assert message.endswith("Sizes that fit: 1, 2, 6")
        with pytest.raises(ConfigError, match="num_key_value_heads = 2 is neither a multiple nor"):
            check_tensor_parallel_size(config, 3)
        for size in (0, -2):
            with pytest.raises(ConfigError, match=f"size must be at least 1, got {size}"):
                check_tensor_parallel_size(config, size)

    def test_layers_check_on_their_own(self) -> None:
        with pytest.raises(ConfigError, match=r"number of outputs \(7\) must be a multiple"):
            ColumnParallelLinear(4, 7, bias=False, placement=placed(0, 2))
        with pytest.raises(ConfigError, match=r"number of inputs \(7\) must be a multiple"):
            RowParallelLinear(7, 4, bias=False, placement=placed(0, 2))
        with pytest.raises(ConfigError, match=r"key/value heads \(2\) must divide .*\(3\)"):
            QKVParallelLinear(4, 2, 6, 2, bias=False, placement=placed(0, 3))


def test_head_ties_or_has_its_own_rows() -> None:
    embedding = VocabParallelEmbedding(5, 3, placement=placed())
    tied = ParallelLMHead(embedding, tied=True, placement=placed())
    own = ParallelLMHead(embedding, tied=False, placement=placed())
    assert tied.rows.weight is embedding.weight
    assert own.rows.weight is not embedding.weight
    embedding.weight.copy_(numbered(5, 3))
    hidden = torch.randn(2, 3)
    torch.testing.assert_close(tied(hidden), hidden @ numbered(5, 3).T)


@pytest.mark.parametrize(("num_kv_heads", "size"), [(4, 2), (2, 2), (2, 4), (1, 8), (4, 1)])
def test_heads_per_rank_are_those_of_the_layers(num_kv_heads: int, size: int) -> None:
    config = dataclasses.replace(
        ModelConfig.from_dict(
            {**make_config(TinySpec()).to_dict(), "architectures": ["Qwen3ForCausalLM"]}
        ),
        num_heads=8,
        num_kv_heads=num_kv_heads,
    )
    layer = QKVParallelLinear(3, 2, 8, num_kv_heads, bias=False, placement=placed(0, size))
    assert heads_per_rank(config, size) == (layer.num_heads, layer.num_kv_heads)


PROMPTS = (tuple((5 * i) % 131 for i in range(21)), (130, 0, 66, 65, 64))

# What the second rank makes different: padded vocabulary (131 over 2), shared KV head, biases
# after a sum, interleaved rows of a GGUF file.
SPECS = {
    "qwen3": TinySpec(family="qwen3", tie_word_embeddings=True),
    "qwen2-shared-kv-head": TinySpec(family="qwen2", num_kv_heads=1, head_dim=None),
    "llama-all-biases": TinySpec(family="llama", attention_bias=True, mlp_bias=True),
    "llama-gguf": TinySpec(family="llama", num_heads=8, num_kv_heads=4, head_dim=16),
    "dummy": TinySpec(family="llama", vocab_size=97),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("ranks")
    return {name: write_checkpoint(folder / name, spec) for name, spec in SPECS.items()}


@pytest.fixture(scope="module")
def files(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    return {
        name: write_gguf(folder / f"{name}.gguf", path, quantization="Q8_0")
        if name.endswith("gguf")
        else path
        for name, path in checkpoints.items()
    }


def prompts_of(name: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(token % SPECS[name].vocab_size for token in prompt) for prompt in PROMPTS)


def load_format_of(name: str) -> str:
    return "dummy" if name == "dummy" else "auto"


@pytest.fixture(scope="module")
def two_ranks(
    files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[list[npt.NDArray[np.float32]]]]:
    """Runs all cases in one pair of processes: starting them takes longer than running them."""
    cases = [
        RankCase(name, path, prompts_of(name), load_format_of(name)) for name, path in files.items()
    ]
    return run_ranks(2, cases, tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("name", list(SPECS))
def test_two_ranks_compute_what_one_computes(
    name: str, files: dict[str, Path], two_ranks: dict[str, list[list[npt.NDArray[np.float32]]]]
) -> None:
    model = load_paged_model(files[name], load_format=load_format_of(name))
    for prompt, of_ranks in zip(prompts_of(name), two_ranks[name], strict=True):
        alone = PagedRunner(model).prompt_logits(prompt)
        first, second = (torch.from_numpy(logits) for logits in of_ranks)
        assert first.shape == (len(prompt), SPECS[name].vocab_size)
        assert torch.equal(first, second)
        torch.testing.assert_close(first, alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "qwen2-shared-kv-head", "llama-all-biases"])
def test_two_ranks_equal_transformers(
    name: str, files: dict[str, Path], two_ranks: dict[str, list[list[npt.NDArray[np.float32]]]]
) -> None:
    reference = load_reference(files[name])
    for prompt, of_ranks in zip(prompts_of(name), two_ranks[name], strict=True):
        expected = reference_logits(reference, prompt)
        torch.testing.assert_close(torch.from_numpy(of_ranks[0]), expected, rtol=0, atol=1e-4)
