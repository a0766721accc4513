"""Decoders in Flax NNX and their tokenizers."""
