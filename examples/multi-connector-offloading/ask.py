"""Asks about a document, then about others, then about the first again, and shows where its prefix came from.

    python examples/multi-connector-offloading/ask.py [URL [WORDS [OTHERS]]]

The pages of a prefix come from the device or from HiSparse's host pool ("local"). Where the device has lost
the indexer's keys, OffloadingConnector loads them ("external"). With few documents the device has everything.
"""

import json
import random
import sys
import urllib.request

URL, WORDS, OTHERS = (*sys.argv[1:], *("http://localhost:8000", "4000", "20")[len(sys.argv) - 1 :])
SOURCES = {"local": "vllm:prefix_cache_hits_total", "external": "vllm:external_prefix_cache_hits_total"}


def document(number: int) -> str:
    """Made-up words, the same every time."""
    choose = random.Random(number)
    return " ".join(f"w{choose.randrange(3, 500)}" for _ in range(int(WORDS)))


def answer(prompt: str) -> str:
    body = {"model": "model", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"{URL}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return str(json.load(response)["choices"][0]["text"])


def hits() -> dict[str, float]:
    """Tokens found in prefix caches so far, by source."""
    with urllib.request.urlopen(f"{URL}/metrics") as response:
        lines = response.read().decode().splitlines()
    return {
        source: sum(float(line.split()[-1]) for line in lines if line.startswith(name))
        for source, name in SOURCES.items()
    }


def main() -> None:
    first = answer(document(0))
    for number in range(1, 1 + int(OTHERS)):
        answer(document(number))
    before = hits()
    again = answer(document(0))
    found = {source: int(count - before[source]) for source, count in hits().items()}
    print(f"same answer: {again == first}")
    print(" ".join(f"{source} tokens: {count}" for source, count in found.items()))


if __name__ == "__main__":
    main()
