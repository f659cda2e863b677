"""What the scheduler costs on the CPU: no model, no GPU, no torch.

Five measurements, each against the limit that the project set itself:

    decode     schedule + commit, ns for each decoding sequence and step, prefix caching on
    prefix     packing, hashing and matching a prompt, ns per token
    blocks     handing out and taking back KV blocks, ns per block
    admission  one request that finds 256 of its blocks in the cache, us, in pools of any size
    memory     bytes that the pool's bookkeeping takes per block, empty and fully cached

Times are CPU times of this process, the median of many short repetitions; `best` is the shortest of
them. On a machine that others use too the median includes what they take from the caches, and
`best` comes near to what a step costs alone. The mean holds what the median hides: the passes of
Python's garbage collector, and lists and dicts that grow.

    python benchmarks/core/bench_scheduler.py
    python benchmarks/core/bench_scheduler.py --only decode --num-seqs 32 256 4096 --json out.json
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import subprocess
import tracemalloc
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time_ns

from nv_core import BlockManager, SamplingParams, Scheduler, SchedulerConfig, StepPlan
from nv_core.block_hash import BlockKeys, default_block_hasher, pack_tokens

BLOCK_SIZE = 16
NUM_HIT_BLOCKS = 256


@dataclass(frozen=True)
class Result:
    """One measurement.

    Attributes:
        name: What was measured.
        unit: Unit of the numbers.
        median: Median of the repetitions.
        mean: Their mean.
        best: The shortest repetition.
        limit: What the median should not exceed; None where nothing was promised.
    """

    name: str
    unit: str
    median: float
    mean: float
    best: float
    limit: float | None

    def __str__(self) -> str:
        limit = "" if self.limit is None else f"  limit {self.limit:g}"
        others = f"mean {self.mean:9.1f}  best {self.best:9.1f}{limit}"
        return f"{self.name:<44}{self.median:9.1f} {self.unit:<10} {others}"


def result(name: str, unit: str, samples: list[float], limit: float | None) -> Result:
    """Sums up repetitions."""
    mean = statistics.fmean(samples)
    return Result(name, unit, statistics.median(samples), mean, min(samples), limit)


def decode(num_seqs: int, *, depth: int, num_steps: int, policy: str) -> Result:
    """Steps in which every sequence decodes; the tokens' dict is made outside the clock."""
    draw = random.Random(0)
    num_blocks = num_seqs * (20 + (num_steps + 2) // BLOCK_SIZE)
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(8192, 300 * num_seqs),
        eos_token_ids=(2,),
        policy=policy,
    )
    scheduler = Scheduler(config)
    for _ in range(num_seqs):
        # Lengths differ, so that each step fills a sixteenth of the sequences' blocks.
        prompt = [draw.randrange(10, 30_000) for _ in range(draw.randrange(100, 260))]
        scheduler.add(prompt, SamplingParams(max_tokens=None))
    in_flight: deque[StepPlan] = deque()
    samples = []
    for step in range(-5, num_steps):
        started = process_time_ns()
        plan = scheduler.schedule()
        elapsed = process_time_ns() - started
        if plan is None:
            raise SystemExit("the scheduler had nothing to run")
        in_flight.append(plan)
        if len(in_flight) == depth:
            oldest = in_flight.popleft()
            token_id = 1000 + step
            tokens = dict.fromkeys(oldest.sampled_seq_ids, token_id)
            started = process_time_ns()
            scheduler.commit(oldest, tokens)
            elapsed += process_time_ns() - started
        if step >= 0:
            samples.append(elapsed / num_seqs)
    name = f"decode, {num_seqs} sequences, depth {depth}, {policy}"
    return result(name, "ns/seq", samples, 1000.0)


def prefix(num_tokens: int, *, repeat: int) -> Result:
    """Packing, hashing and matching of a prompt that the cache holds."""
    draw = random.Random(0)
    prompt = [draw.randrange(30_000) for _ in range(num_tokens)]
    blocks = BlockManager(num_tokens // BLOCK_SIZE + 1, BLOCK_SIZE)
    keys = BlockKeys(BLOCK_SIZE, default_block_hasher)
    keys.extend_packed(pack_tokens(prompt))
    parent = None
    for position, block_id in enumerate(blocks.allocate(len(keys.hashes))):
        parent = blocks.publish(block_id, keys, position, parent)
    samples = []
    for _ in range(repeat):
        started = process_time_ns()
        keys = BlockKeys(BLOCK_SIZE, default_block_hasher)
        keys.extend_packed(pack_tokens(prompt))
        found = blocks.match(keys, len(keys.hashes))
        samples.append((process_time_ns() - started) / num_tokens)
        if len(found) != len(keys.hashes):
            raise SystemExit("the cache lost a block")
    return result(f"hash and match, {num_tokens} tokens", "ns/token", samples, 20.0)


def allocation(num_blocks: int, *, repeat: int) -> Iterator[Result]:
    """Handing out and taking back a table of 64 blocks at a time."""
    blocks = BlockManager(num_blocks, BLOCK_SIZE)
    alloc, free = [], []
    for _ in range(repeat):
        started = process_time_ns()
        tables = [blocks.allocate(64) for _ in range(15)]
        middle = process_time_ns()
        for table in tables:
            blocks.release(table)
        alloc.append((middle - started) / (15 * 64))
        free.append((process_time_ns() - middle) / (15 * 64))
    yield result(f"allocate, pool of {num_blocks}", "ns/block", alloc, 60.0)
    yield result(f"release, pool of {num_blocks}", "ns/block", free, 60.0)


def admission(num_blocks: int, *, repeat: int) -> Result:
    """The step that admits a request whose first 256 blocks are cached and free."""
    scheduler = Scheduler(SchedulerConfig(num_blocks, BLOCK_SIZE))
    prompt = list(range(NUM_HIT_BLOCKS * BLOCK_SIZE + 1))
    samples = []
    plan: StepPlan | None = None
    for turn in range(repeat + 1):
        seq = scheduler.add(prompt, SamplingParams(max_tokens=1))
        # The last to hold the request before, whose 4,097 token ids take longer to free than a
        # step without hits takes.
        del plan
        started = process_time_ns()
        plan = scheduler.schedule()
        elapsed = process_time_ns() - started
        if plan is None:
            raise SystemExit("the scheduler had nothing to run")
        scheduler.commit(plan, {seq.seq_id: 7})
        if turn:
            if seq.num_cached_tokens != NUM_HIT_BLOCKS * BLOCK_SIZE:
                raise SystemExit("the prompt was not found")
            samples.append(elapsed / 1000)
    return result(f"admission of 256 hits, pool of {num_blocks}", "us", samples, 100.0)


def memory(num_blocks: int) -> Iterator[Result]:
    """Bytes per block of a pool, as Python's allocator counts them."""
    gc.collect()
    tracemalloc.start()
    blocks = BlockManager(num_blocks, BLOCK_SIZE)
    gc.collect()
    empty = tracemalloc.get_traced_memory()[0] / num_blocks
    # Different contents in chains of 64 blocks; the sequences that computed them are gone.
    for first in range(0, num_blocks - 63, 64):
        keys = BlockKeys(BLOCK_SIZE, default_block_hasher)
        keys.extend_packed(pack_tokens(range(first * BLOCK_SIZE, (first + 64) * BLOCK_SIZE)))
        table = blocks.allocate(64)
        parent = None
        for position, block_id in enumerate(table):
            parent = blocks.publish(block_id, keys, position, parent)
        blocks.release(table)
    del keys, table, parent
    gc.collect()
    full = tracemalloc.get_traced_memory()[0] / blocks.num_cached_blocks
    tracemalloc.stop()
    tokens = 4 * BLOCK_SIZE
    yield result(f"memory, empty pool of {num_blocks}", "B/block", [empty], 250.0)
    yield result(
        f"memory, fully cached, without the {tokens} B of tokens", "B/block", [full - tokens], 250.0
    )


def machine() -> dict[str, str]:
    """Describes where and on what the numbers were measured."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "cpu": cpu_name(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "commit": commit.stdout.strip() or "unknown",
    }


def cpu_name() -> str:
    """The processor's name where Linux gives one."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=["decode", "prefix", "blocks", "admission", "memory"],
        help="measure these alone; by default everything",
    )
    parser.add_argument(
        "--num-seqs",
        nargs="+",
        type=int,
        default=[32, 256, 1024, 4096],
        help="sizes of the decoding batch (default 32 256 1024 4096)",
    )
    parser.add_argument(
        "--depth", nargs="+", type=int, default=[1, 2], help="plans in flight (default 1 2)"
    )
    parser.add_argument(
        "--num-steps", type=int, default=200, help="decode steps for each size (default 200)"
    )
    parser.add_argument(
        "--policy", nargs="+", default=["mixed"], help="policies of the decode steps (mixed)"
    )
    parser.add_argument(
        "--pools",
        nargs="+",
        type=int,
        default=[1_000, 1_000_000],
        help="numbers of blocks (default 1000 1000000)",
    )
    parser.add_argument(
        "--repeat", type=int, default=200, help="repetitions of the other measurements (200)"
    )
    parser.add_argument("--json", type=Path, help="write machine and results here as well")
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> Iterator[Result]:
    """Runs what was asked for."""

    def wanted(kind: str) -> bool:
        return not arguments.only or kind in arguments.only

    if wanted("decode"):
        for policy in arguments.policy:
            for depth in arguments.depth:
                for num_seqs in arguments.num_seqs:
                    yield decode(
                        num_seqs, depth=depth, num_steps=arguments.num_steps, policy=policy
                    )
    if wanted("prefix"):
        yield prefix(4096, repeat=arguments.repeat)
    for num_blocks in arguments.pools:
        if wanted("blocks"):
            yield from allocation(num_blocks, repeat=arguments.repeat)
        if wanted("admission"):
            yield admission(num_blocks, repeat=arguments.repeat)
    if wanted("memory"):
        yield from memory(min(max(arguments.pools), 250_000))


def main() -> None:
    """Prints the machine, then each result as it comes."""
    arguments = parse_arguments()
    described = machine()
    print(" | ".join(described.values()))
    results = []
    for measured in measure(arguments):
        print(measured, flush=True)
        results.append(asdict(measured))
    if arguments.json:
        arguments.json.write_text(json.dumps({**described, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
