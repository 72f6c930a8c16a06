"""How replays are shown: on a terminal, as one HTML page, as a trace for Perfetto."""
