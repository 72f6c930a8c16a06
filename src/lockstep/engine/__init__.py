"""Engine of one replica: runs tokenizer, step loop, streams and metrics. Uses executors only through their protocol."""
