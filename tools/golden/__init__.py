"""Scripts that wrote the files in tests/golden/; run by hand with the golden extra. CI only compares."""
