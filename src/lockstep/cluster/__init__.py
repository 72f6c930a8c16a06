"""Cluster: serves the models of a manifest behind one narrow interface."""
