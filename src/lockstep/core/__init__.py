"""The closed world: scheduler, KV blocks, prefix cache, fingerprint.

Knows standard-library data types only. No I/O, clock, randomness, logging, threads or numpy; what could differ
between two runs comes in as a value.
"""
