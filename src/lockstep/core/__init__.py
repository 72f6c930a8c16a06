"""The deterministic core: scheduler, KV blocks, prefix cache, fingerprint.

It uses data types of the standard library only, and no I/O, clock, randomness, logging, threads or numpy. Everything
that could differ between two runs is an argument.

    values      request (what comes), step (plan, result, events), policy (limits and pure rules), stats, state
    sequences   sequence (one request; lists of those admitted), queue (those that wait)
    blocks      blocks (pools), prefix (hash to block), kv (holders of blocks, what must move, what is given up)
    deciding    scheduler (the surface) > planner (one step) > step_builder (its budgets and rows); decode_run (repeats)
    proving     fingerprint
"""
