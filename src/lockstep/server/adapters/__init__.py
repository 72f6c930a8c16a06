"""Adapters of other APIs: each translates to a chat request and encodes the answer in its own shape."""
