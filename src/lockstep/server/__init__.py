"""HTTP server: an OpenAI-compatible API in front of a cluster, which it uses only through the `Cluster` protocol."""
