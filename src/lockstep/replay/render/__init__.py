"""Rendering of replays: writes reports as tables, pages and Perfetto traces."""
