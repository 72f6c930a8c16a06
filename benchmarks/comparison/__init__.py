"""`lockstep bench peers`: Lockstep beside other engines and servers, on the same model and the same workloads."""
