"""Real clients, tried against a real server."""
