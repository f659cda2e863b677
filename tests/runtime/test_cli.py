"""The command line, with a scripted model in the place of `LLM`."""

from __future__ import annotations

import dataclasses
import inspect
import io
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from nv_core import CapacityError, ConfigError, RequestError, SamplingParams
from nv_core.policies import SHIPPED_POLICIES
from nv_runtime.cli import main
from nv_runtime.cli.answer import Answer, Interrupts
from nv_runtime.cli.options import ENGINE_FLAGS, SAMPLING_FLAGS, parse_bytes
from nv_runtime.cli.session import ChatModel
from nv_runtime.engine_config import EngineConfig
from nv_runtime.llm import LLM
from nv_runtime.outputs import CompletionOutput, RequestOutput


class ScriptedLLM:
    """Answers every prompt with the same pieces and writes down what it was asked."""

    def __init__(self, pieces: Sequence[str] = ("Hello", " there", "."), **settings: Any) -> None:  # noqa: ANN401
        self.pieces = list(pieces)
        self.prompts: list[Any] = []
        self.params: list[SamplingParams] = []
        self.chats: list[list[dict[str, Any]]] = []
        self.templates: list[dict[str, Any]] = []
        self.num_closed_early = 0
        self.is_shut_down = False
        self.before_piece: Callable[[int], None] = settings.get("before_piece", lambda index: None)
        self.refusal: Exception | None = settings.get("refusal")
        self.defaults = SamplingParams(temperature=0.6, top_k=20)
        self.has_template = settings.get("has_template", True)

    def stream(
        self,
        prompts: Any,  # noqa: ANN401
        sampling_params: SamplingParams | None = None,
    ) -> Iterator[RequestOutput]:
        if self.refusal is not None:
            raise self.refusal
        assert sampling_params is not None
        self.prompts.append(prompts)
        self.params.append(sampling_params)
        return self._answer()

    def _answer(self) -> Iterator[RequestOutput]:
        is_whole = False
        try:
            for index in range(len(self.pieces)):
                self.before_piece(index)
                is_last = index + 1 == len(self.pieces)
                completion = CompletionOutput(
                    index=0,
                    text="".join(self.pieces[: index + 1]),
                    token_ids=list(range(index + 1)),
                    finish_reason="stop" if is_last else None,
                )
                yield RequestOutput(
                    request_id="0",
                    prompt="p",
                    prompt_token_ids=[1, 2, 3, 4],
                    outputs=[completion],
                    finished=is_last,
                    num_cached_tokens=2,
                )
            is_whole = True
        finally:
            self.num_closed_early += not is_whole

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        **template: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        if not self.has_template:
            raise RequestError("chat_template: the model has no chat template")
        self.chats.append([dict(message) for message in messages])
        self.templates.append(template)
        return {"prompt": "rendered", "prompt_token_ids": [1, 2, 3, 4]}

    def get_default_sampling_params(self) -> SamplingParams:
        return self.defaults

    def __enter__(self) -> ChatModel:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.is_shut_down = True


class Run:
    """Runs `nv` on a scripted model."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self.loaded: list[tuple[str, dict[str, Any]]] = []
        self.out = self.err = ""

    def __call__(
        self, *argv: str, llm: ScriptedLLM | None = None, stdin: str | io.TextIOBase = ""
    ) -> int:
        stream = io.StringIO(stdin) if isinstance(stdin, str) else stdin
        self._monkeypatch.setattr(sys, "stdin", stream)

        def load(model: str, options: Mapping[str, Any]) -> ChatModel:
            self.loaded.append((model, dict(options)))
            return llm or ScriptedLLM()

        status = main(argv, load=load)
        self.out, self.err = self._capsys.readouterr()
        return status


@pytest.fixture
def nv(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(capsys, monkeypatch)


class TerminalInput(io.StringIO):
    """Standard input that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def no_model(model: str, options: Mapping[str, Any]) -> ChatModel:
    raise AssertionError("no model should be loaded")


# ---- nv generate


def test_generate_writes_the_text_and_nothing_else_to_stdout(nv: Run) -> None:
    llm = ScriptedLLM()
    assert nv("generate", "some/model", "Say hello", llm=llm) == 0
    assert nv.out == "Hello there.\n"
    assert llm.prompts == ["Say hello"]
    assert llm.is_shut_down
    assert re.fullmatch(
        r"4 prompt tokens \(2 cached\), 3 tokens in \d+\.\d\d s, \d+\.\d tokens/s, first token "
        r"after \d+\.\d\d s",
        strip_style(nv.err).strip(),
    )


def strip_style(text: str) -> str:
    return re.sub(r"\x1b\[\d+m", "", text)


def test_quiet_leaves_statistics_out(nv: Run) -> None:
    assert nv("generate", "m", "p", "--quiet") == 0
    assert (nv.out, nv.err) == ("Hello there.\n", "")


def test_text_is_written_as_it_comes(nv: Run, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    llm = ScriptedLLM(before_piece=lambda index: seen.append(capsys.readouterr().out))
    nv("generate", "m", "p", llm=llm)
    assert seen == ["", "Hello", " there"]


def test_prompt_comes_from_stdin_without_the_last_line_end(nv: Run) -> None:
    for argv in (["generate", "m"], ["generate", "m", "-"]):
        llm = ScriptedLLM()
        assert nv(*argv, llm=llm, stdin="two\nlines\n") == 0
        assert llm.prompts == ["two\nlines"]


def test_a_terminal_without_prompt_is_a_usage_error(nv: Run) -> None:
    assert nv("generate", "m", stdin=TerminalInput()) == 2
    assert "Missing PROMPT" in nv.err
    assert nv.loaded == []


def test_sampling_flags_change_the_models_defaults(nv: Run) -> None:
    llm = ScriptedLLM()
    assert nv("generate", "m", "p", llm=llm) == 0
    assert llm.params == [SamplingParams(temperature=0.6, top_k=20, max_tokens=256)]
    flags = "--temperature 0 --top-p 0.9 --top-k 5 --min-p 0.1 --repetition-penalty 1.1 "
    flags += "--presence-penalty 0.5 --frequency-penalty -0.5 "
    flags += "--max-tokens 7 --min-tokens 2 --ignore-eos --stop-token-ids 3 --stop-token-ids 4 "
    flags += "--no-skip-special-tokens"
    assert nv("generate", "m", "p", *flags.split(), llm=llm) == 0
    assert llm.params[1] == SamplingParams(
        temperature=0.0,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        max_tokens=7,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=(3, 4),
        skip_special_tokens=False,
    )


def test_engine_flags_reach_the_engine_and_absent_ones_do_not(nv: Run) -> None:
    nv("generate", "some/model", "p")
    assert nv.loaded == [("some/model", {"show_progress": False})]
    flags = "--dtype float32 --device cpu --max-model-len 512 --max-num-seqs 4 "
    flags += "--max-num-batched-tokens 128 --block-size 16 --num-gpu-blocks-override 100 "
    flags += "--gpu-memory-utilization 0.5 --kv-cache-memory-bytes 2GiB --tensor-parallel-size 1 "
    flags += "--enforce-eager --no-enable-prefix-caching --attention-backend torch "
    flags += "--kv-cache-dtype fp8 "
    flags += "--scheduling-policy prefill_first --load-format dummy --generation-config vllm "
    flags += "--seed 3 --revision v1"
    nv("generate", "m", "p", *flags.split())
    options = nv.loaded[1][1]
    assert options == {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 512,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "block_size": 16,
        "num_gpu_blocks_override": 100,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": 2 * 1024**3,
        "kv_cache_dtype": "fp8",
        "tensor_parallel_size": 1,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "attention_backend": "torch",
        "scheduling_policy": "prefill_first",
        "load_format": "dummy",
        "generation_config": "vllm",
        "seed": 3,
        "revision": "v1",
        "show_progress": False,
    }
    assert EngineConfig(model="m", **options).max_num_seqs == 4


def test_every_option_has_its_flag_and_every_flag_its_option() -> None:
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    # The first is an argument, the second has --quiet, and commands need text.
    fields -= {"model", "show_progress", "skip_tokenizer_init"}
    assert {flag.name for flag in ENGINE_FLAGS} == fields
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {flag.name for flag in SAMPLING_FLAGS} <= known
    # What the commands' own double of `LLM` has.
    first = list(inspect.signature(LLM.stream).parameters)[:3]
    assert first == ["self", "prompts", "sampling_params"]


def test_generate_as_chat(nv: Run, tmp_path: Path) -> None:
    llm = ScriptedLLM()
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}")
    assert nv("generate", "m", "Hi", "--chat", llm=llm) == 0
    assert nv("generate", "m", "Hi", "--system", "Be brief.", llm=llm) == 0
    assert nv("generate", "m", "Hi", "--no-chat", llm=llm) == 0
    assert llm.prompts.pop() == "Hi"
    status = nv(
        "generate",
        "m",
        "Hi",
        "--chat-template",
        str(template),
        "--chat-template-kwargs",
        '{"enable_thinking": false}',
        llm=llm,
    )
    assert status == 0
    assert nv("generate", "m", "Hi", "--chat-template-kwargs", '{"a": 1}', llm=llm) == 0
    question = {"role": "user", "content": "Hi"}
    assert llm.chats == [
        [question],
        [{"role": "system", "content": "Be brief."}, question],
        [question],
        [question],
    ]
    assert llm.prompts == [{"prompt": "rendered", "prompt_token_ids": [1, 2, 3, 4]}] * 4
    assert llm.templates[0] == {"chat_template": None, "chat_template_kwargs": None}
    assert llm.templates[2] == {
        "chat_template": "{{ messages }}",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert llm.templates[3] == {"chat_template": None, "chat_template_kwargs": {"a": 1}}


def test_help_names_every_policy(nv: Run) -> None:
    assert nv("generate", "--help") == 0
    assert all(name in nv.out for name in SHIPPED_POLICIES)


# ---- errors


@pytest.mark.parametrize(
    "error",
    [
        RequestError("prompt is too long"),
        CapacityError("KV cache too small"),
        OSError("disk on fire"),
        RuntimeError("CUDA out of memory"),
    ],
)
def test_errors_are_one_line_and_status_1(nv: Run, error: Exception) -> None:
    llm = ScriptedLLM(refusal=error)
    assert nv("generate", "m", "p", llm=llm) == 1
    assert (nv.out, nv.err) == ("", f"nv: {error}\n")
    assert llm.is_shut_down
    with pytest.raises(type(error), match=str(error)):
        nv("generate", "m", "p", "--debug", llm=llm)


def test_an_option_that_the_engine_refuses_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(model: str, options: Mapping[str, Any]) -> ChatModel:
        raise ConfigError("dtype must be one of auto, got 'int3'")

    assert main(["generate", "m", "p", "--dtype", "int3"], load=load) == 1
    assert capsys.readouterr().err == "nv: dtype must be one of auto, got 'int3'\n"


def test_wrong_sampling_values_are_one_line(nv: Run) -> None:
    assert nv("generate", "m", "p", "--top-p", "7") == 1
    assert nv.err == "nv: top_p must be a number in (0, 1], got 7.0\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate"], "Missing argument 'MODEL'"),
        (["generate", "m", "p", "--tempr", "1"], "No such option"),
        (["generate", "m", "p", "--top-k", "x"], "not a valid int"),
        (["generate", "m", "p", "--kv-cache-memory-bytes", "lots"], "'lots' is no size"),
        (["generate", "m", "p", "--chat-template-kwargs", "{x"], "is no JSON"),
        (["generate", "m", "p", "--chat-template-kwargs", "[1]"], "is no JSON object"),
        (["generate", "m", "p", "--chat-template", "/no/such"], "does not exist"),
        (["generate", "m", "p", "--no-chat", "--system", "s"], "--system means nothing with"),
        (["generate", "m", "p", "--no-chat", "--chat-template-kwargs", "{}"], "--no-chat"),
        (["translate"], "No such command"),
    ],
)
def test_usage_errors_are_status_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert main(argv, load=no_model) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Usage: nv" in captured.err
    assert captured.out == ""


def test_a_programming_error_is_not_hidden(nv: Run) -> None:
    with pytest.raises(KeyError):
        nv("generate", "m", "p", llm=ScriptedLLM(refusal=KeyError("bug")))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("123", 123),
        ("24GiB", 24 * 1024**3),
        ("24G", 24 * 1024**3),
        ("24 gb", 24 * 1000**3),
        ("1.5TiB", 3 * 2**39),
        ("100KB", 100_000),
        ("7B", 7),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


def test_sizes_that_no_machine_has_are_refused(nv: Run) -> None:
    for size in ("9" * 400, "8388608T", f"{2**63}"):
        assert nv("info", "m", "--memory", size) == 2
        assert "is more than any machine has" in nv.err
    assert parse_bytes(f"{2**63 - 1}") == 2**63 - 1


def bytes_input(content: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")


def test_what_is_no_text_is_named(nv: Run, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_bytes(b"\xff\xfe{{")
    for command in ("generate", "chat"):
        assert nv(command, "m", stdin=bytes_input(b"one\xff\n")) == 1
        assert nv.err.startswith("nv: standard input is no UTF-8 text ('utf-8' codec")
        assert nv(command, "m", "--chat-template", str(file), stdin="p") == 1
        assert nv.err.startswith(f"nv: {file} is no UTF-8 text ('utf-8' codec")


# ---- Ctrl-C


def press_ctrl_c(at: int) -> Callable[[int], None]:
    def press(index: int) -> None:
        if index == at:
            os.kill(os.getpid(), signal.SIGINT)

    return press


def test_ctrl_c_stops_generate_between_tokens(nv: Run) -> None:
    llm = ScriptedLLM(before_piece=press_ctrl_c(at=1))
    before = signal.getsignal(signal.SIGINT)
    assert nv("generate", "m", "p", llm=llm) == 130
    assert nv.out == "Hello there\n"
    assert "stopped by Ctrl-C" in nv.err
    assert llm.num_closed_early == 1
    assert llm.is_shut_down
    assert signal.getsignal(signal.SIGINT) == before


def test_ctrl_c_in_chat_stops_the_answer_only(nv: Run) -> None:
    presses = iter([1])

    def press_once(index: int) -> None:
        if index == 1 and next(presses, None):
            os.kill(os.getpid(), signal.SIGINT)

    llm = ScriptedLLM(before_piece=press_once)
    assert nv("chat", "m", llm=llm, stdin="one\ntwo\n") == 0
    assert nv.out == "Hello there\nHello there.\n"
    assert llm.chats[-1] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hello there"},
        {"role": "user", "content": "two"},
    ]
    assert llm.num_closed_early == 1


def test_the_third_ctrl_c_leaves_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Interrupts() as interrupts:
        assert not interrupts.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.requested
        assert capsys.readouterr().err == ""
        os.kill(os.getpid(), signal.SIGINT)
        assert "once more" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_thread_can_stream_although_it_gets_no_signals() -> None:
    seen = []

    def use() -> None:
        with Interrupts() as interrupts:
            seen.append(interrupts.requested)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [False]


def test_summary_of_answers() -> None:
    assert Answer(num_prompt_tokens=3, duration_s=0.5, finish_reason="stop").summary() == (
        "3 prompt tokens, 0 tokens in 0.50 s"
    )
    answer = Answer(
        text="x",
        num_prompt_tokens=3,
        num_tokens=11,
        finish_reason="length",
        time_to_first_token_s=1.0,
        duration_s=3.0,
    )
    assert answer.summary() == (
        "3 prompt tokens, 11 tokens in 3.00 s, 5.0 tokens/s, first token after 1.00 s, stopped at "
        "the length limit"
    )


# ---- nv chat


def test_chat_keeps_the_conversation(nv: Run) -> None:
    llm = ScriptedLLM(["Yes."])
    assert nv("chat", "m", "--system", "Be brief.", llm=llm, stdin="one\n\n  \ntwo") == 0
    assert nv.out == "Yes.\nYes.\n"
    system = {"role": "system", "content": "Be brief."}
    answer = {"role": "assistant", "content": "Yes."}
    # The first rendering finds out whether the model can chat at all.
    assert llm.chats[1:] == [
        [system, {"role": "user", "content": "one"}],
        [system, {"role": "user", "content": "one"}, answer, {"role": "user", "content": "two"}],
    ]
    assert llm.params[0].max_tokens is None
    assert llm.is_shut_down


def test_reset_forgets_all_but_the_system_message(nv: Run) -> None:
    llm = ScriptedLLM()
    assert nv("chat", "m", "--system", "S", llm=llm, stdin="one\n/reset\ntwo\n") == 0
    assert llm.chats[-1] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "two"},
    ]
    assert "(new conversation)" in nv.err


def test_exit_leaves_and_the_rest_is_not_read(nv: Run) -> None:
    llm = ScriptedLLM()
    assert nv("chat", "m", llm=llm, stdin="/exit\nnever\n") == 0
    assert llm.prompts == []


def test_help_and_unknown_commands(nv: Run) -> None:
    llm = ScriptedLLM()
    assert nv("chat", "m", llm=llm, stdin="/help\n/hepl\n/\n/no_think What is 2+2?\n") == 0
    assert "/reset" in nv.err
    assert "There is no command /hepl" in nv.err
    assert [chat[-1]["content"] for chat in llm.chats[1:]] == ["/no_think What is 2+2?"]


def test_ctrl_d_on_a_terminal_leaves_with_status_0(
    nv: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_of_input(prompt: str) -> str:
        assert prompt == "> "
        raise EOFError

    monkeypatch.setattr("builtins.input", end_of_input)
    assert nv("chat", "m", stdin=TerminalInput()) == 0
    assert nv.err.endswith("\n")
    assert "Traceback" not in nv.err


def test_ctrl_c_at_the_prompt_says_how_to_leave(nv: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    events: Iterator[type[BaseException] | str] = iter([KeyboardInterrupt, "/exit"])

    def read(prompt: str) -> str:
        event = next(events)
        if isinstance(event, str):
            return event
        raise event

    monkeypatch.setattr("builtins.input", read)
    assert nv("chat", "m", stdin=TerminalInput()) == 0
    assert "(Ctrl-D or /exit leaves)" in nv.err


def test_lines_that_go_on(nv: Run) -> None:
    llm = ScriptedLLM()
    assert nv("chat", "m", llm=llm, stdin="one\\\ntwo\\\nthree\n") == 0
    assert llm.chats[-1] == [{"role": "user", "content": "one\ntwo\nthree"}]


def test_a_refused_message_leaves_the_conversation_as_it_was(nv: Run) -> None:
    llm = ScriptedLLM()

    def refuse_once(index: int) -> None:
        llm.refusal = RequestError("prompt has 9000 tokens, at most 4096 fit")

    llm.before_piece = refuse_once
    assert nv("chat", "m", llm=llm, stdin="one\ntwo\n/reset\n") == 0
    assert "nv: prompt has 9000 tokens" in nv.err
    assert "(/reset starts a new conversation)" in nv.err


def test_a_model_that_cannot_chat_is_an_error_at_once(nv: Run) -> None:
    llm = ScriptedLLM(has_template=False)
    assert nv("chat", "m", llm=llm, stdin="one\n") == 1
    assert nv.err == "nv: chat_template: the model has no chat template\n"


# ---- the program


def test_help_needs_no_torch() -> None:
    program = (
        "import sys; from nv_runtime.cli import main; "
        "statuses = [main(a.split()) for a in ('--help', 'generate -h', 'chat -h', 'info -h')]; "
        "heavy = {'torch', 'transformers', 'tokenizers', 'huggingface_hub', 'rich', 'numpy'}; "
        "print('loaded:', sorted(heavy & sys.modules.keys()), statuses)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.endswith("loaded: [] [0, 0, 0, 0]\n")
    for command in ("generate", "chat", "info"):
        assert command in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "nv, version 0.1.0\n"


def test_a_closed_pipe_is_no_traceback() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
        "from nv_runtime.cli import main; from test_cli import ScriptedLLM; "
        "sys.exit(main(['generate', 'm', 'p', '-q'], "
        "load=lambda model, options: ScriptedLLM(['x' * 100_000] * 100)))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait(timeout=60) == 1
        assert process.stderr.read() == ""
