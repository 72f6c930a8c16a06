"""Cluster: models behind one narrow interface."""
