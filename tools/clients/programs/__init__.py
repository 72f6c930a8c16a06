"""Client programs, each of which runs in an environment with one client and without Lockstep."""
