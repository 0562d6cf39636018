"""Serving without devices: vLLM's scheduler and our coordinator as they are, time and workers modelled."""
