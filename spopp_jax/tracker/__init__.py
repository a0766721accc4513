"""Persistent prompt evidence on the host (numpy, float64)."""
