"""Several ranks, one engine: tensor parallelism over processes.

Rank 0 lives in the caller's process and decides; the others follow its commands. Read in order:

    segment.py, ring.py     bytes from one process to several, through shared memory
    wire.py, values.py      what the bytes mean
    plan_encoder.py, plan_replica.py     a plan as what changed since the last one, and back
    process_group.py        the collectives' group; agreement.py: what ranks must agree on
    processes.py, watch.py  starting ranks, and noticing when one is gone
    rank_main.py            what a started rank does
    local_ranks.py          rank 0's side of all that: "mp"
    external_ranks.py       ranks that somebody else started, such as torchrun: "external"
"""
