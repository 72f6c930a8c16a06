"""Functions that a model may call: what it is told of them, what its answer must be, and how calls are read from it."""
