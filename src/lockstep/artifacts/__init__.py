"""Models on disk: where they are, what they are, their tensors and their tokenizer. Depends on no executor."""
