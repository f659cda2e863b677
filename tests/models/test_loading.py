"""Weights: what is loaded, and how everything that can be wrong with a checkpoint is reported."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from nv_core.errors import ConfigError
from nv_models import CausalLM, TensorParallel, WeightError, load_model, open_checkpoint
from nv_models.layers.placement import Placement
from nv_models.loader import _check_coverage
from paged_runner import PagedRunner, load_paged_model, make_backend
from tiny_checkpoints import TinySpec, load_reference, reference_logits, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

PROMPT = [(5 * i) % 131 for i in range(20)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", TinySpec())


def edit_weights(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def edit_config(path: Path, **changes: object) -> None:
    raw = json.loads((path / "config.json").read_text())
    raw.update(changes)
    (path / "config.json").write_text(json.dumps(raw))


def logits_of(path: Path) -> Tensor:
    return PagedRunner(load_paged_model(path)).prompt_logits(PROMPT)


class TestFormats:
    def test_shards_equal_a_single_file(self, tmp_path: Path, checkpoint: Path) -> None:
        sharded = write_checkpoint(tmp_path / "shards", TinySpec(), max_shard_bytes=50_000)
        assert len(list(sharded.glob("*.safetensors"))) > 2
        assert torch.equal(logits_of(sharded), logits_of(checkpoint))

    def test_shards_without_an_index(self, tmp_path: Path, checkpoint: Path) -> None:
        sharded = write_checkpoint(tmp_path / "shards", TinySpec(), max_shard_bytes=50_000)
        (sharded / "model.safetensors.index.json").unlink()
        assert torch.equal(logits_of(sharded), logits_of(checkpoint))

    def test_mistrals_second_copy_is_left_alone(self, tmp_path: Path, checkpoint: Path) -> None:
        (checkpoint / "model.safetensors").rename(checkpoint / "weights.safetensors")
        (checkpoint / "consolidated.safetensors").write_bytes(b"something else")
        assert logits_of(checkpoint).isfinite().all()

    @pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("wanted", [torch.float16, torch.bfloat16, torch.float32])
    def test_dtypes_are_cast(
        self, stored: torch.dtype, wanted: torch.dtype, tmp_path: Path
    ) -> None:
        path = write_checkpoint(tmp_path, TinySpec(dtype=stored))
        assert open_checkpoint(path).config.dtype == stored
        model = load_paged_model(path, dtype=wanted)
        original = load_file(path / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
        assert original.dtype == stored
        loaded = model.get_parameter("layers.1.mlp.down_proj.weight")
        assert torch.equal(loaded, original.to(wanted))

    def test_half_precision_checkpoint_computed_in_fp32(self, tmp_path: Path) -> None:
        path = write_checkpoint(tmp_path, TinySpec(dtype=torch.bfloat16))
        expected = reference_logits(load_reference(path), PROMPT)
        torch.testing.assert_close(logits_of(path), expected, rtol=0, atol=1e-4)

    def test_dtype_of_a_config_that_names_none(self, tmp_path: Path) -> None:
        path = write_checkpoint(tmp_path, TinySpec(dtype=torch.float16))
        edit_config(path, dtype=None)
        assert open_checkpoint(path).config.dtype == torch.float16
        (path / "model.safetensors").unlink()
        assert open_checkpoint(path).config.dtype == torch.float32

    def test_generation_config(self, tmp_path: Path) -> None:
        plain = write_checkpoint(tmp_path / "plain")
        assert open_checkpoint(plain).generation_config == {}
        values = {"temperature": 0.6, "eos_token_id": [1, 2]}
        path = write_checkpoint(tmp_path / "values", generation_config=values)
        assert open_checkpoint(path).generation_config == values
        (path / "generation_config.json").write_text("nope")
        with pytest.raises(ConfigError, match=r"generation_config\.json is not valid JSON"):
            open_checkpoint(path)


class TestTiedEmbeddings:
    def test_one_matrix_in_memory(self, tmp_path: Path) -> None:
        tied = load_paged_model(
            write_checkpoint(tmp_path / "tied", TinySpec(tie_word_embeddings=True))
        )
        untied = load_paged_model(write_checkpoint(tmp_path / "untied", TinySpec()))
        assert tied.lm_head.rows.weight is tied.embedding.weight
        assert untied.lm_head.rows.weight is not untied.embedding.weight
        assert untied.num_weight_bytes - tied.num_weight_bytes == 131 * 64 * 4

    def test_a_stored_copy_of_the_head_is_harmless(self, tmp_path: Path) -> None:
        path = write_checkpoint(tmp_path, TinySpec(tie_word_embeddings=True))
        expected = logits_of(path)

        def add_head(tensors: dict[str, Tensor]) -> None:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

        edit_weights(path, add_head)
        assert torch.equal(logits_of(path), expected)

    def test_only_the_head_is_stored(self, tmp_path: Path) -> None:
        path = write_checkpoint(tmp_path, TinySpec(tie_word_embeddings=True))
        expected = logits_of(path)

        def rename(tensors: dict[str, Tensor]) -> None:
            tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

        edit_weights(path, rename)
        assert torch.equal(logits_of(path), expected)

    def test_a_head_that_differs_is_refused(self, tmp_path: Path) -> None:
        path = write_checkpoint(tmp_path, TinySpec(tie_word_embeddings=True))

        def add_head(tensors: dict[str, Tensor]) -> None:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

        edit_weights(path, add_head)
        with pytest.raises(WeightError, match=r"lm_head\.weight differ, although .* tie_word_emb"):
            load_paged_model(path)


def test_saved_rotary_buffers_are_harmless(checkpoint: Path) -> None:
    expected = logits_of(checkpoint)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(12)
        tensors["model.rotary_emb.inv_freq"] = torch.ones(12)

    edit_weights(checkpoint, add)
    assert torch.equal(logits_of(checkpoint), expected)


class TestWrongTensors:
    def test_missing_and_unknown_and_misshapen_in_one_message(self, checkpoint: Path) -> None:
        def change(tensors: dict[str, Tensor]) -> None:
            del tensors["model.layers.1.self_attn.k_proj.weight"]
            del tensors["model.norm.weight"]
            tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(96)
            tensors["lm_head.weight"] = torch.zeros(130, 64)

        edit_weights(checkpoint, change)
        with pytest.raises(WeightError) as caught:
            load_paged_model(checkpoint)
        message = str(caught.value)
        missing = "model.layers.1.self_attn.k_proj.weight, model.norm.weight"
        assert f"missing tensors: {missing};" in message
        assert "does not have: model.layers.0.self_attn.q_proj.bias;" in message
        assert "lm_head.weight (expected [131, 64], got [130, 64])" in message

    def test_a_missing_head_suggests_tying(self, checkpoint: Path) -> None:
        edit_weights(checkpoint, lambda tensors: tensors.pop("lm_head.weight"))
        with pytest.raises(WeightError, match=r"lm_head\.weight\. A model without a head of its"):
            load_paged_model(checkpoint)

    def test_fewer_layers_than_stored(self, checkpoint: Path) -> None:
        edit_config(checkpoint, num_hidden_layers=1)
        with pytest.raises(WeightError, match=r"does not have: model\.layers\.1\..* and 3 more"):
            load_paged_model(checkpoint)

    def test_shapes_of_a_config_that_lies(self, checkpoint: Path) -> None:
        edit_config(checkpoint, num_key_value_heads=4)
        expected = r"k_proj\.weight \(expected \[96, 64\], got \[48, 64\]\)"
        with pytest.raises(WeightError, match=expected):
            load_paged_model(checkpoint)

    def test_quantised_tensors(self, checkpoint: Path) -> None:
        def quantise(tensors: dict[str, Tensor]) -> None:
            weight = tensors.pop("model.layers.0.mlp.up_proj.weight")
            tensors["model.layers.0.mlp.up_proj.qweight"] = weight.to(torch.int8)

        edit_weights(checkpoint, quantise)
        with pytest.raises(WeightError, match="look like quantised weights"):
            load_paged_model(checkpoint)

    def test_dtypes_that_are_no_weights(self, checkpoint: Path) -> None:
        def to_integers(tensors: dict[str, Tensor]) -> None:
            tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)

        edit_weights(checkpoint, to_integers)
        with pytest.raises(WeightError, match=r"model\.norm\.weight is stored as I8; only F32, F1"):
            load_paged_model(checkpoint)


class TestBrokenFiles:
    @pytest.fixture
    def sharded(self, tmp_path: Path) -> Path:
        return write_checkpoint(tmp_path / "shards", TinySpec(), max_shard_bytes=50_000)

    @pytest.mark.parametrize("with_index", [True, False])
    def test_missing_shards_are_named(self, sharded: Path, with_index: bool) -> None:  # noqa: FBT001
        shards = sorted(sharded.glob("*.safetensors"))
        shards[1].unlink()
        shards[-1].unlink()
        if not with_index:
            (sharded / "model.safetensors.index.json").unlink()
        names = re.escape(f"{shards[1].name}, {shards[-1].name}")
        with pytest.raises(WeightError, match=f"files are missing in .*: {names}; download"):
            load_paged_model(sharded)

    def test_index_names_a_tensor_that_is_not_there(self, sharded: Path) -> None:
        index = sharded / "model.safetensors.index.json"
        listed = json.loads(index.read_text())
        files = sorted(set(listed["weight_map"].values()))
        listed["weight_map"]["model.norm.weight"] = files[0]
        index.write_text(json.dumps(listed))
        message = f"model.norm.weight is in {files[0]}, but it is not there"
        with pytest.raises(WeightError, match=re.escape(message)):
            load_paged_model(sharded)

    def test_index_without_a_map(self, sharded: Path) -> None:
        (sharded / "model.safetensors.index.json").write_text("{}")
        with pytest.raises(WeightError, match="has no weight_map"):
            load_paged_model(sharded)

    @pytest.mark.parametrize(
        "file",
        [
            "../elsewhere.safetensors",
            "a\\b.safetensors",
            "a\0.safetensors",
            "..",
            "",
            "config.json",
            "x" * 5000 + ".safetensors",
            5,
            None,
            [],
        ],
        ids=lambda file: repr(file)[:20],
    )
    def test_index_that_names_no_weight_file(self, file: object, sharded: Path) -> None:
        listed = {"weight_map": {"model.norm.weight": file}}
        (sharded / "model.safetensors.index.json").write_text(json.dumps(listed))
        with pytest.raises(WeightError, match=r"must name \.safetensors files of its own") as error:
            load_paged_model(sharded)
        assert len(str(error.value)) < 1000

    def test_a_tensor_stored_twice(self, sharded: Path) -> None:
        (sharded / "model.safetensors.index.json").unlink()
        save_file({"model.norm.weight": torch.ones(64)}, sharded / "extra.safetensors")
        with pytest.raises(WeightError, match=r"model\.norm\.weight is stored twice .*extra"):
            load_paged_model(sharded)

    @pytest.mark.parametrize(
        "content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", None]
    )
    def test_damaged_files(self, checkpoint: Path, content: bytes | None) -> None:
        file = checkpoint / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100] if content is None else content)
        with pytest.raises(WeightError, match=r"model\.safetensors cannot be read as safetensors"):
            load_paged_model(checkpoint)

    def test_pickle_is_refused_and_never_read(self, checkpoint: Path) -> None:
        (checkpoint / "model.safetensors").unlink()
        with pytest.raises(WeightError, match=r"there is no \.safetensors file"):
            load_paged_model(checkpoint)
        (checkpoint / "model.gguf").write_bytes(b"")
        with pytest.raises(WeightError, match=r"give the path of the file \(model\.gguf\)"):
            load_paged_model(checkpoint)
        (checkpoint / "pytorch_model.bin").write_bytes(b"not even a pickle")
        with pytest.raises(WeightError, match=r"only as pickle \(pytorch_model\.bin\).*Convert it"):
            load_paged_model(checkpoint)


class TestOpening:
    def test_paths_that_are_no_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"path does not exist"):
            open_checkpoint(tmp_path / "nowhere")
        with pytest.raises(ConfigError, match=r"config\.json is missing"):
            open_checkpoint(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"")
        with pytest.raises(ConfigError, match="give the directory of a Hugging Face checkpoint"):
            open_checkpoint(tmp_path / "model.safetensors")

    def test_directory_of_several_gguf_files(self, tmp_path: Path) -> None:
        for name in ("a.gguf", "b.gguf"):
            (tmp_path / name).write_bytes(b"")
        with pytest.raises(ConfigError, match=r"several GGUF files \(a\.gguf, b\.gguf\)"):
            open_checkpoint(tmp_path)


class TestArguments:
    def test_load_format(self, checkpoint: Path) -> None:
        assert load_paged_model(checkpoint, load_format="safetensors").num_weight_bytes > 0
        with pytest.raises(ConfigError, match=r"load_format is 'gguf', but .* is a safetensors"):
            load_paged_model(checkpoint, load_format="gguf")
        with pytest.raises(ConfigError, match=r"load_format must be one of auto, .*, got 'pickle'"):
            load_paged_model(checkpoint, load_format="pickle")

    def test_dtype(self, checkpoint: Path) -> None:
        opened = open_checkpoint(checkpoint)
        backend = make_backend(opened.config)
        with pytest.raises(ConfigError, match=r"dtype must be one of float32, .*float64"):
            load_model(opened, device="cpu", dtype=torch.float64, attention_backend=backend)

    def test_max_model_len_sizes_the_rotary_table(self, checkpoint: Path) -> None:
        assert load_paged_model(checkpoint).max_model_len == 512
        model = load_paged_model(checkpoint, max_model_len=1000)
        assert model.max_model_len == 1000
        assert model.rotary.cos_sin.shape == (1000, 24)
        with pytest.raises(ConfigError, match="max_model_len must be at least 1, got 0"):
            load_paged_model(checkpoint, max_model_len=0)

    def test_progress_counts_the_bytes_on_disk(self, tmp_path: Path) -> None:
        path = write_checkpoint(tmp_path, TinySpec(), max_shard_bytes=50_000)
        calls: list[tuple[int, int]] = []
        model = load_paged_model(path, on_progress=lambda done, total: calls.append((done, total)))
        done = [call[0] for call in calls]
        assert done == sorted(set(done))
        assert {total for _, total in calls} == {model.num_weight_bytes}  # fp32 on disk, too
        assert calls[-1] == (model.num_weight_bytes, model.num_weight_bytes)

    def test_default_device_and_dtype_stay(self, checkpoint: Path) -> None:
        load_paged_model(checkpoint, dtype=torch.bfloat16)
        assert torch.get_default_dtype() == torch.float32
        assert torch.get_default_device() == torch.device("cpu")


def test_bytes_can_be_counted_without_allocating(checkpoint: Path) -> None:
    loaded = load_paged_model(checkpoint)
    config, backend = loaded.config, make_backend(loaded.config)
    model = CausalLM(config, device="meta", dtype=torch.float32, attention_backend=backend)
    assert model.num_weight_bytes == loaded.num_weight_bytes
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_a_parameter_that_no_tensor_fills_is_an_error(checkpoint: Path) -> None:
    model = load_paged_model(checkpoint)
    targets = list(model.targets())
    _check_coverage(model, targets)
    lost = [t for t in targets if t.name != "model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(WeightError, match=r"6144 of the 12288 .*layers\.1\.mlp\.gate_up_proj"):
        _check_coverage(model, lost)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_every_element_is_overwritten(
    rank: int | None, load_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting elements is not enough: parts could overlap. So start from NaN."""

    def empty_weight(placement: Placement, *shape: int) -> torch.nn.Parameter:
        poison = torch.full(shape, torch.nan, dtype=placement.dtype, device=placement.device)
        return torch.nn.Parameter(poison, requires_grad=False)

    monkeypatch.setattr(Placement, "empty_weight", empty_weight)
    # An odd vocabulary: with two ranks, the last rows of the second are padding.
    path = write_checkpoint(tmp_path, TinySpec(family="llama", attention_bias=True, mlp_bias=True))
    group = cast("torch.distributed.ProcessGroup", object())  # loading needs no communication
    tensor_parallel = TensorParallel() if rank is None else TensorParallel(rank, 2, group)
    model = load_paged_model(path, load_format=load_format, tensor_parallel=tensor_parallel)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    if rank == 1:
        num_tokens = model.embedding.num_tokens
        assert num_tokens < model.embedding.rows_per_rank
        assert (model.embedding.weight[num_tokens:] == 0).all()
        assert (model.embedding.weight[num_tokens - 1] != 0).any()
