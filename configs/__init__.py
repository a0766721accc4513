"""One file is one experiment: `get_config()` returns all of its settings."""
