"""Models on the Hugging Face hub: what a source names, which files are needed, how they come, where they are kept."""
