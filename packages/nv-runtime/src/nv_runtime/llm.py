"""LLM: the door to the engine. Code written for vLLM's `LLM` runs after changing the import."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from nv_core import RequestError, SamplingParams
from nv_models import ModelConfig
from nv_runtime.builder import EngineParts, build_engine
from nv_runtime.capture_ahead import capture_graphs
from nv_runtime.conversation import Message, render_conversation, split_conversations
from nv_runtime.engine import Engine
from nv_runtime.engine_stats import require_stats
from nv_runtime.interrupts import interrupts_deferred
from nv_runtime.metrics import Metric
from nv_runtime.one_thread import OneThread
from nv_runtime.outputs import RequestOutput
from nv_runtime.prompt import (
    Prompt,
    TokensPrompt,
    require_tokenizer,
    split_priorities,
    split_prompts,
    split_sampling_params,
    tokenize_prompt,
)
from nv_runtime.request import Request, now
from nv_runtime.start_times import StartPhase
from nv_runtime.stream import OutputStream
from nv_runtime.vllm_options import engine_config_of, refuse_unsupported

if TYPE_CHECKING:
    from nv_runtime.tokenizer import Tokenizer

_DECODE_TURNS = 32
"""Each open request's text is brought up to date in one of so many steps."""


class LLM:
    """Generates text with one model.

    One thread at a time: a second one that calls `generate`, `chat` or `stream`, or advances a
    stream, while another is inside gets a `ConcurrentUseError`; `AsyncLLM` serves many callers.
    Several iterators of `stream` may be open at once; whichever is advanced drives the requests of
    all.
    """

    def __init__(self, model: str, **options: Any) -> None:  # noqa: ANN401 - see EngineConfig
        """Loads a model and makes the engine ready.

        Args:
            model: A local directory, a `.gguf` file, or a Hub id such as `Qwen/Qwen3-0.6B`.
            **options: The other fields of `nv_runtime.EngineConfig`, by name. Further options of
                vLLM are understood at the values that ask for nothing.

        Raises:
            TypeError: An unknown option; the message names the nearest known one.
            NvError: The options, the checkpoint or the memory do not allow it; the message says
                what to change.
        """
        self.config = engine_config_of(model, options)
        self._parts: EngineParts | None = build_engine(self.config)
        self._one_thread = OneThread()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Completes prompts.

        Args:
            prompts: One prompt or a list: text, `{"prompt": text}`,
                `{"prompt_token_ids": [...]}`, or a list of token ids.
            sampling_params: One for all, one for each, or None for the model's defaults.
            use_tqdm: Whether to show a progress bar on standard error, or what makes the bar in
                place of `tqdm.tqdm`.
            lora_request: Not supported.
            priority: One for all or one for each; lower is more urgent, under a policy that uses
                it.
            tokenization_kwargs: Not supported.

        Returns:
            One output per prompt, in the order of the prompts, with `n` answers each. They are
            complete, whatever `output_kind` says.

        Raises:
            RequestError: A prompt or its parameters cannot be served; none of the prompts is
                left running.
            ConcurrentUseError: Another thread is using this `LLM`.
        """
        refuse_unsupported(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        with self._one_thread:
            requests = self._add_requests(prompts, sampling_params, priority)
            return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,  # noqa: FBT001, FBT002 - its place in vLLM
        lora_request: None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: str = "auto",
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Answers conversations.

        Args:
            messages: One conversation or a list of them; each is a list of messages.
            sampling_params: One for all, one for each, or None for the model's defaults.
            use_tqdm: See `generate`.
            lora_request: Not supported.
            chat_template: A Jinja template to use instead of the model's.
            add_generation_prompt: Whether the rendered text ends by opening the answer.
            continue_final_message: Whether the answer goes on in the last message instead.
            tools: Descriptions of tools for the template.
            chat_template_kwargs: Further variables of the template, such as `enable_thinking`.
            chat_template_content_format: Only "auto": the template's own code tells whether it
                reads contents as text or as parts.
            tokenization_kwargs: Not supported.
            mm_processor_kwargs: Not supported.

        Returns:
            One output per conversation, in order.

        Raises:
            RequestError: A conversation cannot be rendered or served.
            ConcurrentUseError: Another thread is using this `LLM`.
        """
        refuse_unsupported(
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
            chat_template_content_format=None
            if chat_template_content_format == "auto"
            else chat_template_content_format,
        )
        conversations = split_conversations(messages)
        prompts = []
        for index, conversation in enumerate(conversations):
            try:
                prompt = self.render_chat(
                    conversation,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,
                    chat_template_kwargs=chat_template_kwargs,
                )
            except RequestError as error:
                if len(conversations) == 1:
                    raise
                raise RequestError(f"conversation {index}: {error}") from error
            prompts.append(prompt)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> TokensPrompt:
        """Renders one conversation into a prompt for `generate` or `stream`.

        Args:
            messages: The conversation.
            chat_template: See `chat`.
            add_generation_prompt: See `chat`.
            continue_final_message: See `chat`.
            tools: See `chat`.
            chat_template_kwargs: See `chat`.

        Returns:
            The prompt's text and tokens. The template has written every special token already,
            so the tokenizer adds none.

        Raises:
            RequestError: The conversation cannot be rendered.
        """
        return render_conversation(
            self.get_tokenizer(),
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
    ) -> OutputStream:
        """Completes prompts and yields each answer as it grows.

        Args:
            prompts: As for `generate`.
            sampling_params: As for `generate`. The `output_kind` of each decides whether its
                outputs hold the answer so far, what is new of it, or come once at the end.
            priority: As for `generate`.

        Returns:
            An iterator over outputs, one whenever a request has new tokens; the last of each
            request has `finished` set. Closing the iterator aborts what is unfinished.

        Raises:
            RequestError: At the call, not at the first step: a prompt cannot be served.
            ConcurrentUseError: Another thread is using this `LLM`, now or when the iterator is
                advanced.
        """
        with self._one_thread:
            requests = self._add_requests(prompts, sampling_params, priority)
            return OutputStream(self._open_parts().engine, requests, self._one_thread)

    def reset_prefix_cache(self) -> bool:
        """Makes everything that was computed so far unfindable for later requests.

        Returns:
            True: requests that are running keep their blocks, so nothing stands in the way.

        Raises:
            ConcurrentUseError: Another thread is using this `LLM`.
        """
        with self._one_thread:
            self._serving_engine().scheduler.reset_prefix_cache()
        return True

    def capture_graphs(self, *, use_tqdm: bool = True) -> int:
        """Captures the CUDA graphs of decode steps of all sizes now, instead of when one occurs.

        They are those for requests like the last one, or without parameters if there was none. It
        takes some tens of milliseconds for each, and may be called at any time; `graph_capture=
        "start"` does it before the engine is ready. With `distributed_executor="external"`, every
        rank has to call it.

        Args:
            use_tqdm: Whether to show a progress bar on standard error.

        Returns:
            How many were captured: 0 if all are there, and where there are none (on a CPU, with
            `enforce_eager`, with the attention backend "torch", and with ranks over gloo).

        Raises:
            ConcurrentUseError: Another thread is using this `LLM`.
        """
        with self._one_thread:
            return capture_graphs(self._serving_engine(), show_progress=use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer.

        Raises:
            RequestError: The engine was made with `skip_tokenizer_init=True`.
        """
        return require_tokenizer(self._open_parts().tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters of requests that bring none."""
        return self._open_parts().default_sampling_params

    def get_metrics(self) -> list[Metric]:
        """Returns what the engine has counted, under vLLM's names with the prefix `nv:`.

        Raises:
            RequestError: The engine was made with `disable_log_stats=True`, the default.
        """
        return require_stats(self._open_parts().engine.stats).metrics()

    @property
    def start_phases(self) -> tuple[StartPhase, ...]:
        """Where the time of the start went, up to the first token once there is one."""
        return self._open_parts().start_times.phases

    @property
    def llm_engine(self) -> Engine:
        """The engine, for those who want to drive it step by step."""
        return self._open_parts().engine

    @property
    def model_config(self) -> ModelConfig:
        """The model's shape."""
        return self._open_parts().model_config

    @property
    def max_model_len(self) -> int:
        """Most tokens, prompt and output, of one sequence."""
        return self._open_parts().max_model_len

    def shutdown(self) -> None:
        """Ends all requests and frees the model's memory; calling it again does nothing.

        Raises:
            ConcurrentUseError: Another thread is using this `LLM`.
        """
        with self._one_thread:
            if self._parts is not None:
                parts, self._parts = self._parts, None
                parts.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _add_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
    ) -> list[Request]:
        engine = self._serving_engine()
        parts = self._open_parts()
        items = split_prompts(prompts)
        params = split_sampling_params(sampling_params, parts.default_sampling_params, len(items))
        priorities = split_priorities(priority, len(items))
        requests: list[Request] = []
        try:
            for item, item_params, urgency in zip(items, params, priorities, strict=True):
                tokenized = tokenize_prompt(item, parts.tokenizer)
                # An interrupt waits until the request that the engine has is in the list.
                with interrupts_deferred():
                    request = engine.add_request(tokenized, item_params, priority=urgency)
                    requests.append(request)
        except BaseException as error:
            self._abort_unfinished(requests)
            if len(items) == 1 or not isinstance(error, RequestError):
                raise
            raise RequestError(f"prompt {len(requests)}: {error}") from error
        return requests

    def _run(
        self,
        requests: list[Request],
        use_tqdm: bool | Callable[..., Any],  # noqa: FBT001 - see `generate`
    ) -> list[RequestOutput]:
        """Runs steps until all requests have ended."""
        engine = self._open_parts().engine
        progress: _Progress | None = None
        outputs: dict[str, RequestOutput] = {}
        try:
            # The bar may be the caller's own, and fail.
            progress = _Progress(requests, use_tqdm)
            for turn in count():
                if not progress.is_open:
                    break
                engine.step()
                # One step ahead, the device is at the next step now: text that is made here costs
                # no time. The open requests take turns, so that little is left when they end.
                for request in progress.open_requests[turn % _DECODE_TURNS :: _DECODE_TURNS]:
                    request.decode_ahead()
                for request in progress.update():
                    outputs[request.request_id] = request.take_output()
        finally:
            try:
                self._abort_unfinished(requests)
            finally:
                if progress is not None:
                    progress.close()
        return [outputs[request.request_id] for request in requests]

    def _open_parts(self) -> EngineParts:
        if self._parts is None:
            raise RequestError("this LLM has been shut down; make a new one")
        return self._parts

    def _serving_engine(self) -> Engine:
        """Returns the engine; raises what it has failed of for good."""
        engine = self._open_parts().engine
        engine.check()
        return engine

    def _abort_unfinished(self, requests: list[Request]) -> None:
        if self._parts is not None:
            self._parts.engine.abort_unfinished(requests)


class _Progress:
    """A bar over finished requests with the rates of the tokens so far."""

    def __init__(self, requests: list[Request], use_tqdm: bool | Callable[..., Any]) -> None:  # noqa: FBT001 - vLLM's name and kind
        self.open_requests = requests
        self._requests = requests
        self._start = now()
        self._bar: Any = None
        if use_tqdm:
            make_bar = use_tqdm if callable(use_tqdm) else tqdm
            self._bar = make_bar(total=len(requests), desc="Processed prompts", dynamic_ncols=True)

    @property
    def is_open(self) -> bool:
        return bool(self.open_requests)

    def update(self) -> list[Request]:
        """Moves the bar on; returns the requests that have ended since the last call."""
        finished = [request for request in self.open_requests if request.is_finished]
        if not finished:
            return finished
        self.open_requests = [r for r in self.open_requests if not r.is_finished]
        if self._bar is not None:
            seconds = max(now() - self._start, 1e-9)
            num_input = sum(
                r.num_prompt_tokens for r in self._requests if r.metrics.first_token_time
            )
            num_output = sum(r.num_output_tokens for r in self._requests)
            self._bar.set_postfix_str(
                f"est. speed input: {num_input / seconds:.2f} toks/s, "
                f"output: {num_output / seconds:.2f} toks/s",
                refresh=False,
            )
            self._bar.update(len(finished))
        return finished

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
