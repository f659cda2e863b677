"""How fast the simulator is: requests a second of one core, on the Azure-conversation look-alike.

Qwen3-8B on an H200 as the preset has them, requests coming four times as fast as in the trace,
blocks of 16 tokens. Once with every block accounted for and no prefix cache, once with the prefix
cache, which hashes all prompts and answers. Times are CPU times of this process, without metrics.

    python benchmarks/core/bench_simulator.py
"""

from __future__ import annotations

import argparse
import platform
from time import process_time

from nv_core import SchedulerConfig
from nv_core.sim import LOOK_ALIKES, RooflineLatency, find_hardware, find_model, simulate

LIMITS = {False: 3000, True: 1500}
"""Requests a second that there should be, without and with the prefix cache."""


def measure_rate(num_requests: int, *, prefix_caching: bool) -> tuple[float, float]:
    """Simulates once; returns requests a second, and microseconds for each sequence and step."""
    workload = LOOK_ALIKES["azure-conversation"](num_requests).faster(4)
    latency = RooflineLatency(find_model("qwen3-8b"), find_hardware("h200"))
    config = SchedulerConfig(48_000, 16, enable_prefix_caching=prefix_caching)
    start = process_time()
    log = simulate(workload, config, latency)
    seconds = process_time() - start
    num_shares = sum(len(step.seq_ids) for step in log.steps)
    return num_requests / seconds, 1e6 * seconds / num_shares


def main() -> None:
    """Prints the best and the median of some repetitions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-requests", type=int, default=5000)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()} | CPython {platform.python_version()}")
    for prefix_caching in (False, True):
        runs = sorted(
            measure_rate(arguments.num_requests, prefix_caching=prefix_caching)
            for _ in range(arguments.repeat)
        )
        name = "prefix cache" if prefix_caching else "blocks only"
        median, best = runs[len(runs) // 2], runs[-1]
        print(
            f"{name:<14}{median[0]:7.0f} requests/s  best {best[0]:7.0f}  "
            f"limit {LIMITS[prefix_caching]}  ({median[1]:.2f} us/sequence and step)"
        )


if __name__ == "__main__":
    main()
