"""EngineThread: the engine in a thread of its own, serving callers in asyncio event loops.

One thread owns the engine: it alone touches requests and scheduler. Callers send it commands
through one queue, which it reads between steps; it sends outputs back into each caller's event
loop, those of a step in one go.

Back-pressure: a caller has at most one output that it has not taken yet. Until it takes it, nothing
is decoded or built for it; what has come meanwhile is in the next output. So a slow caller costs
the engine neither time nor memory, and never makes others wait.

This file knows nothing of prompts as text, or of options; read `nv_runtime.async_llm` next.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from nv_core import EngineDeadError, RequestError, SamplingParams
from nv_runtime.engine import Engine
from nv_runtime.outputs import RequestOutput
from nv_runtime.prompt import TokenizedPrompt
from nv_runtime.request import Request

_T = TypeVar("_T")
_Command = Callable[[], None]
_Item = RequestOutput | Exception


class Subscription:
    """One caller's side of one request. All methods belong to the caller's event loop."""

    def __init__(self, server: _Server) -> None:
        """Makes the side of a request that is about to be sent."""
        self.event_loop = asyncio.get_running_loop()
        self._server = server
        self._note_taken = partial(server.note_taken, self)
        self._items: deque[_Item] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._is_open = True

    def put(self, item: _Item) -> None:
        """Brings the next output, or the error that takes the place of all further ones."""
        self._items.append(item)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def take(self) -> RequestOutput:
        """Waits for the next output.

        Raises:
            RequestError: The request cannot be served.
            EngineDeadError: The engine has failed.
        """
        while not self._items:
            self._arrival = self.event_loop.create_future()
            await self._arrival
        item = self._items.popleft()
        if isinstance(item, Exception):
            self._is_open = False
            raise item
        if item.finished:
            self._is_open = False
        else:
            self._server.send(self._note_taken)
        return item

    def close(self) -> None:
        """Ends the request, if it has not ended; calling it again does nothing."""
        if self._is_open:
            self._is_open = False
            self._server.send(partial(self._server.cancel, self))


class EngineThread:
    """Runs an engine until it is stopped, fails, or nobody holds this object any more."""

    def __init__(self, engine: Engine, *, captures_when_idle: bool = False) -> None:
        """Starts the thread.

        Args:
            engine: An idle engine, which from now on belongs to the thread.
            captures_when_idle: Whether it captures CUDA graphs ahead while it has nothing to do.
        """
        self._server = _Server(engine, captures_when_idle=captures_when_idle)
        # A daemon, since one that is waited for at exit could not be stopped by then.
        self._thread = threading.Thread(target=self._server.run, name="nv-engine", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._server, self._thread)

    @property
    def failure(self) -> BaseException | None:
        """What the engine failed with; None if it did not."""
        return self._server.failure

    @property
    def is_running(self) -> bool:
        """Whether requests are served."""
        return self._server.is_running

    def check(self) -> None:
        """Says why requests are not served any more.

        Raises:
            EngineDeadError: The engine has failed.
            RequestError: It was stopped.
        """
        if not self._server.is_running:
            raise self._server.why_not()

    def subscribe(
        self,
        prompt: TokenizedPrompt,
        sampling_params: SamplingParams,
        *,
        request_id: str | None,
        priority: int,
    ) -> Subscription:
        """Sends a request; whether it can be served is told by the first `take`.

        Args:
            prompt: See `Engine.add_request`.
            sampling_params: See `Engine.add_request`.
            request_id: See `Engine.add_request`.
            priority: See `Engine.add_request`.
        """
        subscription = Subscription(self._server)
        add_request = partial(
            self._server.engine.add_request,
            prompt,
            sampling_params,
            request_id=request_id,
            priority=priority,
        )
        self._server.send(partial(self._server.add, subscription, add_request))
        return subscription

    def abort(self, request_ids: Iterable[str]) -> Future[None]:
        """Ends requests by name, each with a last output to its caller; unknown ones are ignored.

        Returns:
            Resolved when it is done.
        """
        return self.call(partial(self._server.abort, tuple(request_ids)))

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Runs a function between two steps.

        Returns:
            Its result, or what it raised.
        """
        future: Future[_T] = Future()
        self._server.send(partial(self._server.run_for, future, function))
        return future

    def stop(self) -> None:
        """Ends all requests and the thread; waits for the step that runs. May be called twice."""
        self._finalizer()


def _stop(server: _Server, thread: threading.Thread) -> None:
    server.send(server.stop)
    if thread is not threading.current_thread():
        thread.join()


class _Client:
    """What the thread knows of one subscription.

    Attributes:
        subscription: The caller's side.
        request: The engine's side.
        is_ready: Whether the caller has taken the last output that it was sent.
    """

    def __init__(self, subscription: Subscription, request: Request) -> None:
        self.subscription = subscription
        self.request = request
        self.is_ready = True


class _Server:
    """The thread's side: everything but `send` and the properties runs in the thread."""

    def __init__(self, engine: Engine, *, captures_when_idle: bool) -> None:
        self.engine = engine
        self._captures_when_idle = captures_when_idle
        self.failure: BaseException | None = None
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._clients: dict[Subscription, _Client] = {}
        self._client_of: dict[Request, _Client] = {}
        self._with_news: dict[_Client, None] = {}
        self._is_stopping = False
        # Held while a command is sent or the thread ends, so that none is sent too late. It can be
        # taken twice, since the garbage collector may stop an engine in the middle of a `send`.
        self._lock = threading.RLock()
        self._has_ended = False

    @property
    def is_running(self) -> bool:
        """Whether commands are carried out."""
        return not (self._has_ended or self._is_stopping)

    def why_not(self) -> Exception:
        """Makes the error for a caller who comes too late."""
        if self.failure is None:
            return RequestError("this AsyncLLM has been shut down; make a new one")
        error = EngineDeadError(
            f"the engine has failed with {type(self.failure).__name__}: {self.failure}; it serves "
            "no more requests, make a new one"
        )
        error.__cause__ = self.failure
        return error

    def send(self, command: _Command) -> None:
        """Puts a command into the queue; may be called from any thread."""
        with self._lock:
            if not self._has_ended:
                self._commands.put(command)
                return
        # The thread is gone; every command knows what that means for its sender.
        command()

    def run(self) -> None:
        """Serves until it is stopped or the engine fails."""
        try:
            while not self._is_stopping:
                if self.engine.has_work:
                    self._note_news(self.engine.step())
                # After the step, so that whoever took an output meanwhile gets the next one now.
                is_idle = not (self.engine.has_work or self._with_news)
                self._run_commands(waits=is_idle and not self._capture_next_graph())
                self._deliver()
        except BaseException as error:  # noqa: BLE001 - nobody else would ever hear of it
            self.failure = error
        self._end()

    def add(self, subscription: Subscription, add_request: Callable[[], Request]) -> None:
        """Adds a request, or tells its caller why not."""
        if self._has_ended:
            self._post([(subscription, self.why_not())])
            return
        try:
            request = add_request()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the caller's alone
            self._post([(subscription, error)])
            return
        client = _Client(subscription, request)
        self._clients[subscription] = client
        self._client_of[request] = client

    def note_taken(self, subscription: Subscription) -> None:
        """Notes that a caller has taken its last output."""
        client = self._clients.get(subscription)
        if client is not None and not self._has_ended:
            client.is_ready = True
            self._with_news[client] = None

    def cancel(self, subscription: Subscription) -> None:
        """Ends the request of a caller who has gone."""
        client = self._clients.get(subscription)
        if client is not None and not self._has_ended:
            self._forget(client)
            if not client.request.is_finished:
                self.engine.abort_request(client.request.request_id)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests by name; unknown names are ignored."""
        for request_id in request_ids:
            request = self.engine.abort_request(request_id)
            if request is not None:
                self._note_news([request])

    def run_for(self, future: Future[_T], function: Callable[[], _T]) -> None:
        """Runs a function for a caller who waits for its result."""
        if not future.set_running_or_notify_cancel():
            return
        if self._has_ended:
            future.set_exception(self.why_not())
            return
        try:
            future.set_result(function())
        except Exception as error:  # noqa: BLE001 - it is the caller's alone
            future.set_exception(error)

    def stop(self) -> None:
        """Ends the thread after the step that runs."""
        self._is_stopping = True

    def _run_commands(self, *, waits: bool) -> None:
        if waits:
            self._commands.get()()
        while not self._is_stopping:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _capture_next_graph(self) -> bool:
        """Uses idle time for one graph, so that whoever comes meanwhile waits for one at most.

        Returns:
            Whether there may be another.
        """
        if not self._captures_when_idle or not self._commands.empty():
            return False
        return self.engine.capture_next_graph()

    def _note_news(self, requests: Iterable[Request]) -> None:
        for request in requests:
            client = self._client_of.get(request)
            if client is not None:
                self._with_news[client] = None

    def _deliver(self) -> None:
        """Sends one output to each caller who has taken the one before and for whom there is one.

        For the others, `note_taken` brings the news up again.
        """
        outputs: list[tuple[Subscription, _Item]] = []
        for client in self._with_news:
            request = client.request
            if client.is_ready and request.has_news:
                client.is_ready = False
                outputs.append((client.subscription, request.take_output()))
        self._with_news.clear()
        self._post(outputs)

    def _post(self, items: list[tuple[Subscription, _Item]]) -> None:
        """Hands items to their event loops, and forgets the callers who will get no more."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[Subscription, _Item]]] = {}
        for subscription, item in items:
            batches.setdefault(subscription.event_loop, []).append((subscription, item))
            if isinstance(item, Exception) or item.finished:
                client = self._clients.get(subscription)
                if client is not None:
                    self._forget(client)
        for event_loop, batch in batches.items():
            try:
                event_loop.call_soon_threadsafe(_put_all, batch)
            except RuntimeError:  # the event loop is closed, and its callers are gone
                for subscription, _ in batch:
                    self.cancel(subscription)

    def _forget(self, client: _Client) -> None:
        del self._clients[client.subscription]
        del self._client_of[client.request]
        self._with_news.pop(client, None)

    def _end(self) -> None:
        """Tells all callers that it is over; later ones are told when they come."""
        with self._lock:
            self._has_ended = True
        if self.failure is None:
            try:
                self.engine.close()
            except Exception as error:  # noqa: BLE001 - the callers must be told, whatever it is
                self.failure = error
        items: list[tuple[Subscription, _Item]] = []
        for subscription, client in self._clients.items():
            if self.failure is None:
                items.append((subscription, client.request.take_output()))
            else:
                items.append((subscription, self.why_not()))
        self._post(items)
        while not self._commands.empty():
            self._commands.get()()
        if self.failure is not None:
            # What failed may well fail again; everybody has been told by now.
            with suppress(Exception):
                self.engine.close()


def _put_all(batch: list[tuple[Subscription, _Item]]) -> None:
    for subscription, item in batch:
        subscription.put(item)
