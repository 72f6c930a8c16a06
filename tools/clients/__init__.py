"""Tests with real clients against a real server."""
