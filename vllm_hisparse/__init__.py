"""Hierarchical KV for top-k sparse attention: a vLLM plugin."""

__version__ = "0.1.0"
