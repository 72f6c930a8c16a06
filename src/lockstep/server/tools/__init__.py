"""Functions that a model may call: their description in its prompt, its answer, and the calls that are read from it."""
