"""The composition root: the only package that reads argv and environ."""
