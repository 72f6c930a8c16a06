"""`lockstep bench peers`: compares Lockstep with other engines and servers on the same model and workloads."""
