"""Dispatch, collection, metrics and the training loop."""
