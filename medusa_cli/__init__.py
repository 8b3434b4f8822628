"""Medusa heads for any Hugging Face causal language model: train them, decode with them, keep every word."""

__version__ = "0.1.0"
