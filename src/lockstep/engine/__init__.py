"""One replica at work: tokenizer, step loop, streams and metrics. Uses executors through their protocol only."""
