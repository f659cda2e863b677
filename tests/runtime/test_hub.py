"""Finding models, with the Hub library's own offline behaviour and its real errors."""

from __future__ import annotations

import logging
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from nv_core.errors import ConfigError, NvError
from nv_runtime.hub import ModelNotFoundError, resolve_model


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def forbid_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: object, **options: object) -> str:
        pytest.fail(f"asked the Hub for {args}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


def test_local_models_are_taken_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_downloads(monkeypatch)
    file = tmp_path / "model.Q4_K.gguf"
    file.touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(file) == file
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_model("org/name") == Path("org/name")
    assert resolve_model(".") == Path()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org") == tmp_path / "org"


@pytest.mark.parametrize(
    "name",
    [
        "/no/such/model",
        "./qwen",
        "../qwen",
        "~/qwen",
        "models/qwen/0.6b",
        "models/",
        "model.gguf",
        "here/qwen.gguf",
        "here/qwen",
        "C:\\models\\qwen",
        "~nobody-of-this-name/qwen",
        "./" + 5000 * "x",
        "a/" + 5000 * "x" + "/qwen",
    ],
)
def test_a_mistyped_path_never_reaches_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    forbid_downloads(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "qwen3").mkdir(parents=True)
    with pytest.raises(ModelNotFoundError, match="there is no"):
        resolve_model(name)


def test_a_missing_path_lists_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "qwen3-0.6b").mkdir()
    (tmp_path / "smol.gguf").touch()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelNotFoundError, match=r"there are: qwen3-0\.6b, smol\.gguf\."):
        resolve_model(tmp_path / "qwen3")
    with pytest.raises(ModelNotFoundError, match=r"the directory .* does not exist"):
        resolve_model(tmp_path / "a" / "b")


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ConfigError, match=r"no \.gguf file; give the directory"):
        resolve_model(file)


def test_names_that_are_no_hub_ids_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_downloads(monkeypatch)
    with pytest.raises(ModelNotFoundError, match="model is empty"):
        resolve_model("")
    for name in ("a b", "-x/y", "org/na me", "org:name"):
        with pytest.raises(ModelNotFoundError, match="neither an existing path nor a Hub id"):
            resolve_model(name)


def test_a_revision_of_a_local_model_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve_model(tmp_path, revision="main") == tmp_path
    assert "revision 'main' is not used" in caplog.text


@pytest.mark.usefixtures("offline")
def test_offline_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"Hub cannot be reached.*local copy") as caught:
        resolve_model("Qwen/Qwen3-0.6B", cache_dir=tmp_path)
    assert isinstance(caught.value, (NvError, ValueError))


def write_cache(cache: Path, repo_id: str, *files: str) -> Path:
    """Lays out a download as the Hub library does."""
    repository = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    for file in files:
        (snapshot / file).write_text("{}")
    return snapshot


@pytest.mark.usefixtures("offline")
def test_offline_finds_earlier_downloads(tmp_path: Path) -> None:
    snapshot = write_cache(tmp_path, "Qwen/Qwen3-0.6B", "config.json")
    assert resolve_model("Qwen/Qwen3-0.6B", cache_dir=tmp_path) == snapshot
    assert resolve_model("Qwen/Qwen3-0.6B", revision="0" * 40, cache_dir=tmp_path) == snapshot
    with pytest.raises(ModelNotFoundError, match="cannot be reached"):
        resolve_model("Qwen/Qwen3-0.6B", revision="v2", cache_dir=tmp_path)


@pytest.mark.usefixtures("offline")
def test_a_repository_without_config_is_no_checkpoint(tmp_path: Path) -> None:
    write_cache(tmp_path, "org/model-GGUF", "README.md")
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json.*GGUF"):
        resolve_model("org/model-GGUF", cache_dir=tmp_path)


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    # Releases of the Hub library differ in the HTTP client whose response this is.
    response: Any = SimpleNamespace(headers={}, request=None, status_code=status)
    return kind("from the Hub", response=response)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(errors.RepositoryNotFoundError, 401), "no such public model.*hf auth login"),
        (http_error(errors.GatedRepoError, 403), "asks for a licence to be accepted"),
        (http_error(errors.RevisionNotFoundError, 404), "no revision 'v9'"),
        (http_error(errors.HfHubHTTPError, 503), r"did not hand out .*from the Hub.*local copy"),
        (errors.HFValidationError("two dots"), r"no valid Hub id \(two dots\)"),
        (errors.OfflineModeIsEnabled("off"), "cannot be reached"),
    ],
)
def test_answers_of_the_hub_are_explained(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def download(*args: object, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelNotFoundError, match=message):
        resolve_model("org/name", revision="v9")


def test_only_what_is_needed_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        (tmp_path / "config.json").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/name", revision="v1", cache_dir="cache") == tmp_path
    assert (asked["repo_id"], asked["revision"], asked["cache_dir"]) == ("org/name", "v1", "cache")

    def is_downloaded(file: str) -> bool:
        wanted = any(fnmatch(file, pattern) for pattern in asked["allow_patterns"])
        return wanted and not any(fnmatch(file, pattern) for pattern in asked["ignore_patterns"])

    needed = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    needed += ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    needed += ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    assert all(is_downloaded(file) for file in needed)
    unneeded = ["pytorch_model.bin", "original/consolidated.00.safetensors", "tf_model.h5"]
    unneeded += ["consolidated.safetensors", "onnx/model.onnx", "README.md", "picture.png"]
    assert not any(is_downloaded(file) for file in unneeded)
    resolve_model("org/name", with_weights=False)
    assert is_downloaded("config.json")
    assert is_downloaded("model.safetensors.index.json")
    assert not is_downloaded("model-00001-of-00002.safetensors")
