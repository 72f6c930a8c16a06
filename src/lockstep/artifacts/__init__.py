"""Model artifacts: locate and open models on disk, and read their configuration, tensors and tokenizer.

Independent of executors.
"""
