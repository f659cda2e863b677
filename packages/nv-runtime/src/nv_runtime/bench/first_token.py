"""The process that `startup.py` times: imports, builds an engine, and generates one token.

It notes the time before torch and the engine are imported, so no import may stand above that.
"""

import time

_STARTED = time.time()

import json  # noqa: E402
import sys  # noqa: E402
from dataclasses import asdict  # noqa: E402


def main() -> None:
    """Runs the job given as JSON on the command line and writes the times as JSON."""
    job = json.loads(sys.argv[1])
    from nv_runtime import LLM, SamplingParams
    from nv_runtime.import_times import IMPORT_SECONDS

    imported = time.time()
    llm = LLM(job["model"], show_progress=False, **job["options"])
    ready = time.time()
    prompt = [token % 97 for token in range(job["num_prompt_tokens"])]
    llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
    first_token = time.time()
    marks = {
        "python_s": _STARTED,
        "imported_s": imported,
        "ready_s": ready,
        "first_token_s": first_token,
    }
    phases = [asdict(phase) for phase in llm.start_phases]
    report = {"marks": marks, "imports": dict(IMPORT_SECONDS), "phases": phases}
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
