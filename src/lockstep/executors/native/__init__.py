"""A forward pass of our own in C++, under construction: kernels whose results have the same bits on every processor."""
