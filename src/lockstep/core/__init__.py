"""The closed world: scheduler, KV blocks, prefix cache, fingerprint.

Knows standard-library data types only. No I/O, clock, randomness, logging, threads or numpy; what could differ
between two runs comes in as a value.

    values      request (what came), step (plan, result, events), policy (limits and pure rules), stats
    who         sequence (one life), roster (who runs, who was preempted), queue (who waits), victims (who yields)
    where       blocks (pools), prefix (hash to block), kv (who holds which block, what must move)
    deciding    scheduler (the surface) > planner (one step) > draft (its budgets and rows); steady (steps that repeat)
    proving     fingerprint
"""
