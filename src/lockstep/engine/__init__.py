"""One replica at work: tokenizer, step loop, streams and metrics. Knows executors by their protocol only."""
