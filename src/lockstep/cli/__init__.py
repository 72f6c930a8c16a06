"""The composition root: the only room that reads argv and environ."""
