"""Hugging Face hub: parse hub sources, select and download the files of a model, and manage the cache."""
