"""Text environments: text in, text out, no jax."""
