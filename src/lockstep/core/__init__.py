"""The closed world: scheduler, KV blocks, prefix cache, fingerprint.

Knows standard-library data types only. No I/O, clock, randomness, logging, threads or numpy; what could differ
between two runs comes in as a value.

    values      request (what comes), step (plan, result, events), policy (limits and pure rules), stats, state
    sequences   sequence (one life; lists of those admitted), queue (who waits)
    blocks      blocks (pools), prefix (hash to block), kv (who holds which block, what must move, who gives some up)
    deciding    scheduler (the surface) > planner (one step) > step_builder (its budgets and rows); decode_run (repeats)
    proving     fingerprint
"""
