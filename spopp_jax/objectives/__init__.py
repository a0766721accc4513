"""Policy objectives: one file a method, each a composition of kernels."""
