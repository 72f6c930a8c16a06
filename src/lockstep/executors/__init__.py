"""Executors: turn a plan into logits; sampling turns logits into tokens. Executors do not depend on each other."""
