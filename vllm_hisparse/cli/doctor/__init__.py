"""`vllm-hisparse doctor`: whether this machine can serve with HiSparse.

`machine.py` says what is looked at, `probes.py` looks, `checks.py` judges, `command.py` prints.
"""
