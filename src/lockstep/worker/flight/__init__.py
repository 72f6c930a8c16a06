"""Flight recorder: writes each decision of a device in a few bytes, so that the decisions can be replayed."""
