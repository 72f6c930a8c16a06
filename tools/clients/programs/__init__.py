"""Small programs, one a client, each run in an environment that has this client and nothing of ours."""
