"""Device workers: each owns a device, its replicas and the loop that runs their steps."""
