"""The flight recorder: what a device decided, in bytes, so that it can be decided again."""
