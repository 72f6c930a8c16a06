"""An LLM serving runtime that gives the same bytes alone or batched."""
