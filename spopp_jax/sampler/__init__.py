"""The rollout service: the only package that speaks gRPC."""
