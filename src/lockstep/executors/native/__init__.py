"""The forward pass in C++: packed weights, programs and kernels whose results have the same bits on every processor."""
