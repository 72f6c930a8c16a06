"""Reports of replays: tables and pages as documents, and traces for Perfetto."""
