"""The Kernel IR: nodes, affine expressions, builder, verifier, text."""
