"""Load generators for servers, which they reach only by HTTP, and for engines, which they call by their API."""
