"""AsyncLLM: the engine for asyncio programs, with the surface of vLLM's class of that name.

    llm = AsyncLLM("Qwen/Qwen3-0.6B")
    async for output in llm.generate("Once upon a time", SamplingParams(), request_id="1"):
        print(output.outputs[0].text)
    llm.shutdown()

Many tasks may do so at once, from one event loop or several. The engine runs in a thread of its
own; `nv_runtime.engine_thread` is where the two meet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from nv_core import ConfigError, RequestError, SamplingParams
from nv_runtime.builder import EngineParts, build_engine
from nv_runtime.capture_ahead import capture_graphs
from nv_runtime.conversation import Message, render_conversation
from nv_runtime.engine_config import EngineConfig
from nv_runtime.engine_stats import require_stats
from nv_runtime.engine_thread import EngineThread
from nv_runtime.metrics import Metric
from nv_runtime.outputs import RequestOutput
from nv_runtime.prompt import (
    Prompt,
    is_text,
    require_one_prompt,
    require_tokenizer,
    split_sampling_params,
    tokenize_prompt,
)
from nv_runtime.vllm_options import engine_config_of, refuse_unsupported

if TYPE_CHECKING:
    from nv_runtime.tokenizer import Tokenizer


class AsyncLLM:
    """Serves many callers at once with one model."""

    def __init__(self, model: str, **options: Any) -> None:  # noqa: ANN401 - see EngineConfig
        """Loads a model, which takes as long as it takes, and starts the engine's thread.

        Args:
            model: See `LLM`.
            **options: See `LLM`.

        Raises:
            TypeError: An unknown option; the message names the nearest known one.
            NvError: The options, the checkpoint or the memory do not allow it; the message says
                what to change.
        """
        self._start(engine_config_of(model, options))

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> AsyncLLM:
        """Makes one from options that are already together.

        Args:
            engine_args: What vLLM calls `AsyncEngineArgs`.

        Raises:
            NvError: See the class.
        """
        llm = cls.__new__(cls)
        llm._start(engine_args)
        return llm

    def _start(self, config: EngineConfig) -> None:
        if config.tensor_parallel_size > 1 and config.distributed_executor == "external":
            raise ConfigError(
                "distributed_executor='external' is for LLM: AsyncLLM takes requests as they come, "
                "and ranks that run the same program do not see them come in the same steps; use "
                "distributed_executor='mp', or LLM"
            )
        self.config = config
        self._parts: EngineParts = build_engine(config)
        self._thread = EngineThread(
            self._parts.engine, captures_when_idle=config.graph_capture == "idle"
        )

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: None = None,
        tokenization_kwargs: None = None,
        trace_headers: None = None,
        data_parallel_rank: None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Completes a prompt and yields the answer as it grows.

        The request starts with the first `async for` step, and is aborted when the generator is
        closed or the task that iterates is cancelled. Whoever takes outputs more slowly than they
        come gets fewer and longer ones; no text or token is lost.

        Args:
            prompt: One prompt in any form that `LLM.generate` takes.
            sampling_params: None for the model's defaults. `output_kind` decides what is yielded:
                the answer so far, what is new of it, or only the complete one.
            request_id: The caller's name for it, unique among the unfinished ones; by default a
                number.
            priority: Lower is more urgent, under a policy that uses it.
            lora_request: Not supported.
            tokenization_kwargs: Not supported.
            trace_headers: Not supported.
            data_parallel_rank: Not supported.

        Yields:
            Outputs; the last has `finished` set.

        Raises:
            RequestError: The request cannot be served; all others go on.
            EngineDeadError: The engine has failed, now or before.
        """
        refuse_unsupported(
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            data_parallel_rank=data_parallel_rank,
        )
        require_one_prompt(prompt)
        self._thread.check()
        (params,) = split_sampling_params(sampling_params, self._parts.default_sampling_params, 1)
        tokenizer = self._parts.tokenizer
        if is_text(prompt):
            # A long text takes a while; the tokenizer lets other threads run meanwhile.
            tokenized = await asyncio.to_thread(tokenize_prompt, prompt, tokenizer)
        else:
            tokenized = tokenize_prompt(prompt, tokenizer)
        subscription = self._thread.subscribe(
            tokenized, params, request_id=request_id, priority=priority
        )
        try:
            while True:
                output = await subscription.take()
                yield output
                if output.finished:
                    return
        finally:
            subscription.close()

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers a conversation and yields the answer as it grows.

        Args:
            messages: The conversation.
            sampling_params: See `generate`.
            request_id: See `generate`.
            priority: See `generate`.
            chat_template: See `LLM.chat`.
            add_generation_prompt: See `LLM.chat`.
            continue_final_message: See `LLM.chat`.
            tools: See `LLM.chat`.
            chat_template_kwargs: See `LLM.chat`.

        Returns:
            What `generate` returns.

        Raises:
            RequestError: At once, if the conversation cannot be rendered; else see `generate`.
        """
        prompt = render_conversation(
            require_tokenizer(self._parts.tokenizer),
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(prompt, sampling_params, request_id, priority=priority)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests; whoever iterates gets a last output with `finish_reason="abort"`.

        Args:
            request_id: One name or several; unknown and finished requests are left alone.

        Raises:
            RequestError: It is neither; no request is ended.
        """
        await asyncio.wrap_future(self._thread.abort(_names(request_id)))

    async def reset_prefix_cache(self) -> None:
        """Makes everything that was computed so far unfindable for later requests."""
        scheduler = self._parts.engine.scheduler
        await asyncio.wrap_future(self._thread.call(scheduler.reset_prefix_cache))

    async def capture_graphs(self) -> int:
        """Captures the CUDA graphs of decode steps of all sizes; see `LLM.capture_graphs`.

        Requests wait meanwhile. With `graph_capture="idle"`, the default, the engine does the same
        by itself, and lets requests go first.
        """
        capture = partial(capture_graphs, self._parts.engine, show_progress=False)
        return await asyncio.wrap_future(self._thread.call(capture))

    async def get_metrics(self) -> list[Metric]:
        """Returns what the engine has counted, as of a moment between two steps.

        Raises:
            RequestError: See `LLM.get_metrics`.
            EngineDeadError: The engine has failed.
        """
        stats = require_stats(self._parts.engine.stats)
        return await asyncio.wrap_future(self._thread.call(stats.metrics))

    async def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer.

        Raises:
            RequestError: The engine was made with `skip_tokenizer_init=True`.
        """
        return require_tokenizer(self._parts.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters of requests that bring none."""
        return self._parts.default_sampling_params

    @property
    def max_model_len(self) -> int:
        """Most tokens, prompt and output, of one sequence."""
        return self._parts.max_model_len

    async def check_health(self) -> None:
        """Returns if requests are served.

        Raises:
            EngineDeadError: The engine has failed.
            RequestError: It was shut down.
        """
        self._thread.check()

    @property
    def is_running(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_running

    @property
    def errored(self) -> bool:
        """Whether the engine has failed."""
        return self._thread.failure is not None

    def shutdown(self) -> None:
        """Ends all requests (their callers get a last output) and the engine's thread.

        Waits for the step that runs. Calling it again does nothing.
        """
        self._thread.stop()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()


def _names(request_id: str | Iterable[str]) -> list[str]:
    names: list[object]
    if isinstance(request_id, Iterable):
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        if all(isinstance(name, str) for name in names):
            return [str(name) for name in names]
    raise RequestError(f"request_id must be a str or several, got {request_id!r}")
