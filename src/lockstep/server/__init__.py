"""An OpenAI-compatible front: HTTP in, calls to the cluster out. Uses the cluster through its protocol only."""
