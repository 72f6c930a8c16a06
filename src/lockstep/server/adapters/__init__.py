"""API adapters: translate requests of other APIs to chat requests and encode answers in the format of each API."""
