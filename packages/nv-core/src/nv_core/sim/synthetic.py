"""Synthetic workloads: arrival processes, lengths, shared prefixes, and look-alikes of traces.

Everything is drawn from a `random.Random` of the given seed, so that a workload is the same on
every machine. Lengths are drawn from quantile tables, which describe real traces far better than a
fitted lognormal does; input and output lengths are drawn independently, which real traces allow.
The look-alikes (`LOOK_ALIKES`) hold no data of the traces that they resemble, only such tables.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from nv_core.errors import ConfigError
from nv_core.sim.workload import Workload, WorkRequest, workload_of

LEVELS = (0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1)
"""Levels of the quantile tables below."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths, given by its quantiles; log-linear between them.

    Args:
        quantiles: Lengths in tokens, not falling.
        levels: Their levels, from 0 to 1.
    """

    quantiles: tuple[float, ...]
    levels: tuple[float, ...] = LEVELS

    def __post_init__(self) -> None:
        """Checks the table."""
        rises = all(a <= b for a, b in itertools.pairwise(self.quantiles))
        if len(self.quantiles) != len(self.levels) or not rises or self.quantiles[0] < 1:
            raise ConfigError(
                f"quantiles must be {len(self.levels)} lengths of at least 1 that do not fall, "
                f"got {self.quantiles!r}"
            )

    @classmethod
    def fixed(cls, length: int) -> Lengths:
        """Every length is the same."""
        return cls((length, length), (0, 1))

    @classmethod
    def between(cls, least: int, most: int) -> Lengths:
        """Lengths between two numbers, the short ones as dense as the long ones on a log scale."""
        return cls((least, most), (0, 1))

    def at(self, level: float) -> int:
        """Returns the length at a level in [0, 1]."""
        place = min(bisect_right(self.levels, level), len(self.levels) - 1) - 1
        low, high = self.levels[place], self.levels[place + 1]
        share = (level - low) / (high - low)
        a, b = self.quantiles[place], self.quantiles[place + 1]
        return max(1, round(math.exp((1 - share) * math.log(a) + share * math.log(b))))

    def draw(self, source: random.Random) -> int:
        """Draws a length."""
        return self.at(source.random())


AZURE_CODE_INPUT = Lengths(
    (3, 17, 75, 147, 386, 770, 1075, 1469, 1909, 2433, 3192, 5188, 7303, 7436, 7437, 7437)
)
AZURE_CODE_OUTPUT = Lengths((6, 6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 251, 825, 1899))
AZURE_CONVERSATION_INPUT = Lengths(
    (2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4142, 6179, 14050)
)
AZURE_CONVERSATION_OUTPUT = Lengths(
    (7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 954, 1000)
)
MOONCAKE_INPUT = Lengths(
    (
        *(891, 894, 901, 964, 1662, 3263, 4993, 6909, 9570, 13196),
        *(17869, 27367, 39550, 85400, 121301, 126195),
    )
)
MOONCAKE_OUTPUT = Lengths(
    (1, 3, 10, 24, 100, 213, 291, 350, 399, 447, 504, 597, 698, 1119, 2000, 2000)
)

# Defaults of the generators below.
_TURNS, _ANSWERS = Lengths.between(20, 400), Lengths.between(30, 600)
_DOCUMENTS, _QUESTIONS = Lengths.between(1000, 8000), Lengths.between(20, 100)

Arrivals = Iterator[float]
"""Times of arrival in seconds, without end."""


def poisson_arrivals(rate_per_s: float, *, seed: int = 0) -> Arrivals:
    """Arrivals that know nothing of each other."""
    return gamma_arrivals(rate_per_s, seed=seed)


def gamma_arrivals(rate_per_s: float, *, burstiness: float = 1.0, seed: int = 0) -> Arrivals:
    """Arrivals with gamma-distributed gaps.

    Args:
        rate_per_s: Mean rate.
        burstiness: Shape of the gamma distribution, as in vLLM's benchmark: 1 is Poisson, less
            comes in bursts; the gaps' coefficient of variation is its inverse square root.
        seed: Of the draws.
    """
    _check_positive(rate_per_s=rate_per_s, burstiness=burstiness)
    return _gamma(rate_per_s, burstiness, random.Random(seed))


def _gamma(rate_per_s: float, shape: float, draw: random.Random) -> Arrivals:
    now = 0.0
    while True:
        if shape == 1:
            now += draw.expovariate(rate_per_s)
        else:
            now += draw.gammavariate(shape, 1 / (rate_per_s * shape))
        yield now


def on_off_arrivals(
    on_rate_per_s: float, *, mean_on_s: float, mean_off_s: float, seed: int = 0
) -> Arrivals:
    """Poisson arrivals while a source is on; times on and off are exponentially distributed."""
    _check_positive(on_rate_per_s=on_rate_per_s, mean_on_s=mean_on_s, mean_off_s=mean_off_s)
    return _on_off(on_rate_per_s, mean_on_s, mean_off_s, random.Random(seed))


def _on_off(rate: float, mean_on_s: float, mean_off_s: float, draw: random.Random) -> Arrivals:
    start = 0.0
    while True:
        end = start + draw.expovariate(1 / mean_on_s)
        now = start + draw.expovariate(rate)
        while now < end:
            yield now
            now += draw.expovariate(rate)
        start = end + draw.expovariate(1 / mean_off_s)


def varying_arrivals(rates_per_s: Seq[float], *, period_s: float = 60.0, seed: int = 0) -> Arrivals:
    """Poisson arrivals whose rate changes from period to period.

    Args:
        rates_per_s: A rate for each period; starts again after the last.
        period_s: Length of a period.
        seed: Of the draws.
    """
    if not rates_per_s or min(rates_per_s) < 0 or not max(rates_per_s) > 0:
        raise ConfigError(f"rates_per_s must hold a positive rate, got {rates_per_s!r}")
    return _varying(rates_per_s, period_s, random.Random(seed))


def _varying(rates: Seq[float], period_s: float, draw: random.Random) -> Arrivals:
    # A Poisson process of rate 1 in the integral of the rate.
    start, due = 0.0, draw.expovariate(1)
    for rate in itertools.cycle(rates):
        mass = rate * period_s
        while due < mass:
            yield start + due / rate
            due += draw.expovariate(1)
        due -= mass
        start += period_s


def with_arrivals(workload: Workload, arrivals: Arrivals) -> Workload:
    """Returns the same requests, in the same order, at other times."""
    moved = [
        replace(request, arrival_s=time)
        for request, time in zip(workload.requests, arrivals, strict=False)
    ]
    return replace(workload, requests=tuple(moved))


def make_workload(
    num_requests: int,
    *,
    arrivals: Arrivals,
    prompt_lengths: Lengths,
    output_lengths: Lengths,
    num_users: int = 0,
    seed: int = 0,
    name: str = "synthetic",
) -> Workload:
    """Makes requests that share no prefix.

    Args:
        num_requests: How many.
        arrivals: When they come.
        prompt_lengths: Lengths of prompts.
        output_lengths: Lengths of answers.
        num_users: Spreads them over so many users, of whom the k-th sends a share of about 1 / k;
            0 for no users.
        seed: Of the draws.
        name: Of the workload.
    """
    draw = random.Random(seed)
    pick_user = _zipf(num_users, 1.0) if num_users else None
    requests = [
        WorkRequest(
            time,
            prompt_lengths.draw(draw),
            output_lengths.draw(draw),
            user=None if pick_user is None else f"user {pick_user(draw)}",
        )
        for time in itertools.islice(arrivals, num_requests)
    ]
    return workload_of(name, requests)


def make_sessions(
    num_sessions: int,
    *,
    arrivals: Arrivals,
    mean_turns: float = 4.0,
    mean_think_s: float = 30.0,
    system_prompt_tokens: int = 200,
    turn_lengths: Lengths = _TURNS,
    output_lengths: Lengths = _ANSWERS,
    tokens_per_s: float = 30.0,
    seed: int = 0,
    name: str = "sessions",
) -> Workload:
    """Makes conversations: each turn's prompt is all that was said before, and something new.

    Args:
        num_sessions: How many conversations; each is a user.
        arrivals: When each begins.
        mean_turns: Mean number of turns, geometrically distributed.
        mean_think_s: Mean time from the end of an answer to the next turn.
        system_prompt_tokens: Length of the prompt that all conversations begin with.
        turn_lengths: Lengths of what the user says in a turn.
        output_lengths: Lengths of answers.
        tokens_per_s: How fast answers are taken to come, which sets the time of the next turn: a
            workload is made before it is known how fast it is served.
        seed: Of the draws.
        name: Of the workload.
    """
    _check_positive(mean_think_s=mean_think_s, tokens_per_s=tokens_per_s)
    if mean_turns < 1:
        raise ConfigError(f"mean_turns must be at least 1, got {mean_turns!r}")
    draw = random.Random(seed)
    new_id = itertools.count(1)
    system = ((0, system_prompt_tokens),) if system_prompt_tokens else ()
    requests = []
    for session, start in enumerate(itertools.islice(arrivals, num_sessions)):
        time, said = start, system
        while True:
            said = (*said, (next(new_id), turn_lengths.draw(draw)))
            answer = next(new_id)
            length = output_lengths.draw(draw)
            requests.append(
                WorkRequest(
                    time,
                    sum(tokens for _, tokens in said),
                    length,
                    segments=said,
                    output_segment=answer,
                    user=f"session {session}",
                )
            )
            if draw.random() < 1 / mean_turns:
                break
            said = (*said, (answer, length))
            time += length / tokens_per_s + draw.expovariate(1 / mean_think_s)
    return workload_of(name, requests)


def make_documents(
    num_requests: int,
    *,
    arrivals: Arrivals,
    num_documents: int = 100,
    exponent: float = 1.0,
    num_system_prompts: int = 1,
    system_prompt_tokens: int = 200,
    document_lengths: Lengths = _DOCUMENTS,
    question_lengths: Lengths = _QUESTIONS,
    output_lengths: Lengths = _ANSWERS,
    seed: int = 0,
    name: str = "documents",
) -> Workload:
    """Makes questions about documents, some of which are asked about far more often than others.

    Args:
        num_requests: How many.
        arrivals: When they come.
        num_documents: How many documents there are.
        exponent: The k-th document is asked about in proportion to k ** -exponent (Zipf).
        num_system_prompts: How many prompts there are for a request to begin with.
        system_prompt_tokens: Length of each of them.
        document_lengths: Lengths of the documents, which follow.
        question_lengths: Lengths of the questions, which no two requests share.
        output_lengths: Lengths of answers.
        seed: Of the draws.
        name: Of the workload.
    """
    draw = random.Random(seed)
    lengths = [document_lengths.draw(draw) for _ in range(num_documents)]
    pick_document = _zipf(num_documents, exponent)
    pick_system = _zipf(num_system_prompts, 1.0)
    requests = []
    for time in itertools.islice(arrivals, num_requests):
        system, document = pick_system(draw), pick_document(draw)
        # A document behind another system prompt is another prefix, but the same id will do: what
        # is before it differs.
        segments = ((system, system_prompt_tokens), (10**6 + document, lengths[document]))
        length = system_prompt_tokens + lengths[document] + question_lengths.draw(draw)
        requests.append(WorkRequest(time, length, output_lengths.draw(draw), segments=segments))
    return workload_of(name, requests)


@dataclass(frozen=True, kw_only=True)
class Branching:
    """How prompts of a trace continue earlier ones, in blocks.

    Attributes:
        block_size: Tokens per block.
        num_shared_blocks: Leading blocks that all prompts share.
        continuing_share: Share of requests that continue an earlier prompt.
        reuse: For those, (share of them, least, most) of the part of the prompt that is reused.
        median_age_s: Median age of the prompt that is continued; lognormally distributed.
        age_sigma: Its logarithm's standard deviation.
        min_parent_blocks: If set, a prompt takes its length from the one that it continues, which
            has at least so many blocks, and `length_bias` counts for nothing.
        length_bias: Exponent on the level at which a continuing prompt's length is drawn: below 1
            they are longer than others.
        fresh_bias: The same for all others.
    """

    block_size: int = 512
    num_shared_blocks: int = 1
    continuing_share: float
    reuse: tuple[tuple[float, float, float], ...]
    median_age_s: float
    age_sigma: float
    min_parent_blocks: int | None = None
    length_bias: float = 1.0
    fresh_bias: float = 1.0


def make_branching(
    num_requests: int,
    *,
    arrivals: Arrivals,
    branching: Branching,
    prompt_lengths: Lengths,
    output_lengths: Lengths,
    seed: int = 0,
    name: str = "branching",
) -> Workload:
    """Makes prompts that continue earlier ones, as block hashes in traces show it.

    Args:
        num_requests: How many.
        arrivals: When they come.
        branching: How they continue.
        prompt_lengths: Lengths of prompts.
        output_lengths: Lengths of answers.
        seed: Of the draws.
        name: Of the workload.
    """
    draw = random.Random(seed)
    new_id = itertools.count(branching.num_shared_blocks)
    size = branching.block_size
    times: list[float] = []
    blocks: list[tuple[int, ...]] = []
    requests = []
    for time in itertools.islice(arrivals, num_requests):
        continues = bool(blocks) and draw.random() < branching.continuing_share
        bias = branching.length_bias if continues else branching.fresh_bias
        length = prompt_lengths.at(draw.random() ** bias)
        num_blocks = -(-length // size)
        prefix: tuple[int, ...] = tuple(range(min(num_blocks, branching.num_shared_blocks)))
        if continues:
            share = _draw_reuse(branching, draw)
            age = branching.median_age_s * math.exp(draw.gauss(0, branching.age_sigma))
            least = branching.min_parent_blocks or min(num_blocks, round(num_blocks * share))
            follows = branching.min_parent_blocks is not None
            parent = _near(times, blocks, time - age, least, shortest=not follows)
            if follows:
                num_blocks = max(1, round(len(blocks[parent]) / share))
                length = num_blocks * size - draw.randrange(size)
            num_reused = min(num_blocks, round(num_blocks * share))
            prefix = max(prefix, blocks[parent][:num_reused], key=len)
            # As a conversation does, each prompt goes on once.
            blocks[parent] = ()
        own = (*prefix, *(next(new_id) for _ in range(num_blocks - len(prefix))))
        times.append(time)
        blocks.append(own)
        requests.append(
            WorkRequest(
                time,
                length,
                output_lengths.draw(draw),
                segments=tuple((block, size) for block in own),
            )
        )
    return workload_of(name, requests)


def _draw_reuse(branching: Branching, draw: random.Random) -> float:
    """Draws which part of a prompt is that of an earlier one."""
    level = draw.random()
    for share, least, most in branching.reuse:
        if level < share:
            return draw.uniform(least, most)
        level -= share
    return branching.reuse[-1][2]


def _near(
    times: list[float],
    blocks: list[tuple[int, ...]],
    time: float,
    num_blocks: int,
    *,
    shortest: bool,
) -> int:
    """Which prompt from around a time is long enough; the longest if none is.

    Args:
        times: When each prompt came.
        blocks: Its blocks; empty if it has gone on already.
        time: The time.
        num_blocks: What is long enough.
        shortest: Whether to take the shortest of those, instead of the nearest.
    """
    place = min(bisect_left(times, time), len(times) - 1)
    around = range(max(0, place - 60), min(len(blocks), place + 60))
    enough = [index for index in around if len(blocks[index]) >= num_blocks]
    if not enough:
        return max(around, key=lambda index: len(blocks[index]))
    if shortest:
        return min(enough, key=lambda index: len(blocks[index]))
    return min(enough, key=lambda index: abs(index - place))


def azure_conversation(num_requests: int = 19_366, *, seed: int = 0) -> Workload:
    """Looks like the conversations of the Azure LLM inference trace of 2023.

    Poisson arrivals within a minute; the rate drifts between 3.2 and 8.4 requests a second.
    """
    draw = random.Random(seed)
    rates = [
        5.53 * (1 + 0.35 * math.sin(minute / 9) + draw.uniform(-0.1, 0.1)) for minute in range(57)
    ]
    return make_workload(
        num_requests,
        arrivals=varying_arrivals(rates, seed=seed),
        prompt_lengths=AZURE_CONVERSATION_INPUT,
        output_lengths=AZURE_CONVERSATION_OUTPUT,
        seed=seed,
        name="azure-conversation",
    )


def azure_code(num_requests: int = 8_819, *, seed: int = 0) -> Workload:
    """Looks like the code completions of the Azure LLM inference trace of 2023: long bursts."""
    return make_workload(
        num_requests,
        arrivals=on_off_arrivals(6.9, mean_on_s=32, mean_off_s=54, seed=seed),
        prompt_lengths=AZURE_CODE_INPUT,
        output_lengths=AZURE_CODE_OUTPUT,
        seed=seed,
        name="azure-code",
    )


MOONCAKE_BRANCHING = Branching(
    continuing_share=0.41,
    reuse=((0.26, 0.1, 0.5), (0.41, 0.5, 0.9), (0.33, 0.9, 1.0)),
    median_age_s=120,
    age_sigma=0.95,
    length_bias=0.65,
    fresh_bias=1.25,
)

MOONCAKE_SYNTHETIC_BRANCHING = Branching(
    num_shared_blocks=0,
    continuing_share=0.52,
    reuse=((0.12, 0.5, 0.9), (0.88, 0.95, 1.0)),
    median_age_s=120,
    age_sigma=1.75,
    min_parent_blocks=16,
)
MOONCAKE_SYNTHETIC_FRESH_INPUT = Lengths(
    (10, 20, 400, 5500, 20000, 30000, 50000, 70000), (0, 0.1, 0.5, 0.55, 0.8, 0.9, 0.99, 1)
)
MOONCAKE_SYNTHETIC_OUTPUT = Lengths((1, 4, 69, 389, 768, 2000), (0, 0.1, 0.5, 0.9, 0.99, 1))


def mooncake_conversation(num_requests: int = 12_031, *, seed: int = 0) -> Workload:
    """Looks like Mooncake's conversation trace: long prompts that continue earlier ones."""
    return make_branching(
        num_requests,
        arrivals=poisson_arrivals(3.4, seed=seed),
        branching=MOONCAKE_BRANCHING,
        prompt_lengths=MOONCAKE_INPUT,
        output_lengths=MOONCAKE_OUTPUT,
        seed=seed,
        name="mooncake-conversation",
    )


def mooncake_synthetic(num_requests: int = 3_993, *, seed: int = 0) -> Workload:
    """Looks like Mooncake's synthetic trace: nothing of a prompt is reused, or nearly all."""
    return make_branching(
        num_requests,
        arrivals=poisson_arrivals(3.9, seed=seed),
        branching=MOONCAKE_SYNTHETIC_BRANCHING,
        prompt_lengths=MOONCAKE_SYNTHETIC_FRESH_INPUT,
        output_lengths=MOONCAKE_SYNTHETIC_OUTPUT,
        seed=seed,
        name="mooncake-synthetic",
    )


def sessions(num_requests: int = 2_000, *, seed: int = 0) -> Workload:
    """Conversations of four turns on average behind one system prompt."""
    arrivals = poisson_arrivals(1.0, seed=seed)
    return make_sessions(num_requests, arrivals=arrivals, seed=seed).first(num_requests)


def documents(num_requests: int = 2_000, *, seed: int = 0) -> Workload:
    """Questions about a hundred documents of Zipf popularity."""
    return make_documents(num_requests, arrivals=poisson_arrivals(2.0, seed=seed), seed=seed)


LOOK_ALIKES: dict[str, Callable[..., Workload]] = {
    "azure-conversation": azure_conversation,
    "azure-code": azure_code,
    "mooncake-conversation": mooncake_conversation,
    "mooncake-synthetic": mooncake_synthetic,
    "sessions": sessions,
    "documents": documents,
}
"""Named workloads: functions of a number of requests and a seed."""


def _zipf(count: int, exponent: float) -> Callable[[random.Random], int]:
    """Returns a function that draws from 0 to count - 1, the k-th as often as k ** -exponent."""
    if count < 1:
        raise ConfigError(f"there must be at least one to choose from, got {count!r}")
    sums = list(itertools.accumulate((k + 1) ** -exponent for k in range(count)))

    def pick(draw: random.Random) -> int:
        return min(bisect_right(sums, draw.random() * sums[-1]), count - 1)

    return pick


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ConfigError(f"{name} must be positive, got {value!r}")
