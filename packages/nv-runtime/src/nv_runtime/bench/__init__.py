"""Benchmarks of the engine, behind `nv bench` and the scripts in `benchmarks/`.

`workload.py` says what is asked, `throughput.py`, `latency.py` and `startup.py` measure one thing
each, `roofline.py` says what the device would allow, `steps.py` and `profiling.py` look inside, and
`environment.py` says where it was measured. Each measurement is a function that returns plain data.
"""
