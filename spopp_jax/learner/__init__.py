"""Packing, the jitted update and the learner's checkpoint."""
