"""Device workers: one owns a device, the replicas on it and the loop that hands out their steps."""
