"""Asks the server of compose.json a question, and shows what HiSparse has counted so far.

python examples/single-node/ask.py [URL]
"""

import json
import sys
import urllib.request

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
PROMPT = "The capital of France is"


def main() -> None:
    body = {"model": "model", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"{URL}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        print(json.load(answer)["choices"][0]["text"])
    with urllib.request.urlopen(f"{URL}/metrics") as metrics:
        for line in metrics.read().decode().splitlines():
            if line.startswith("vllm:hisparse_requests"):
                print(line)


if __name__ == "__main__":
    main()
