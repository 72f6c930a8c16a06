"""Executors turn a plan into logits; sampling turns logits into tokens. Executors do not know each other."""
