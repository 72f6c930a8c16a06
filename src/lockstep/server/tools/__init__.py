"""Tool calls: describe functions in the prompt, constrain the answer, and parse calls from it."""
