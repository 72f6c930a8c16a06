"""The release gate: mirrored evidence in, a verdict out."""
