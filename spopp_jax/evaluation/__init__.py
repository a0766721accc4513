"""Curves, paired statistics and plots."""
