"""Pure jnp kernels: importable from any trainer, no state, no I/O."""
