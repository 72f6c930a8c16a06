"""The default executor: our own paged graph on OpenVINO, for CPU and Intel GPU."""
