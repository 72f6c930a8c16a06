"""An OpenAI-compatible front: HTTP in, calls to the cluster out. Knows the cluster by its protocol only."""
