"""Replacement policies of a hot region, replayed over selection traces.

numpy alone: no engine, no torch. The policies that the engine ships are in `ops/`; `kernel.py` follows them
bit by bit.
"""
