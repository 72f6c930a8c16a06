"""Load generators: what a user measures before choosing. They know servers by HTTP only, and engines by their API."""
