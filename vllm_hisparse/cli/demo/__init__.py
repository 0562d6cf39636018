"""Two growing requests in a pool too small for both: plain vLLM against HiSparse, on a real engine.

| module | content |
|---|---|
| `command.py` | the subcommand: three runs one after the other, then the verdict |
| `process.py` | an engine in a process of its own, seen from the demo |
| `frames.py` | what an engine process tells the demo |
| `engine.py` | the engine process |
| `sizes.py` | model, prompts and pools |
| `progress.py` | what has been seen so far |
| `view.py`, `lines.py` | drawn live on a terminal, and as lines elsewhere |
| `summary.py` | comparison of outputs, table, JSON |
"""
