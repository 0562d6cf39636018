"""One address for two engines: prompts are computed by one, answers by the other.

    python examples/pd-nixl/proxy.py --port 8000 --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

A request goes to the prefill engine first, for one token; its answer says where the prompt's pages are
(`kv_transfer_params`), and with that the request goes to the decode engine, whose answer is passed on as it
comes. An example: one engine of each kind, no retries.
"""

import argparse
import json
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHUNK = 1 << 16


class Proxy(BaseHTTPRequestHandler):
    """One request."""

    prefill: str
    decode: str

    def do_POST(self) -> None:
        """/v1/completions and /v1/chat/completions."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            self._answer(self._post(self.decode, {**body, "kv_transfer_params": self._compute_prompt(body)}))
        except urllib.error.HTTPError as error:
            self._answer(error)

    def do_GET(self) -> None:
        """Everything else is the decode engine's: /health, /metrics, /v1/models."""
        try:
            self._answer(urllib.request.urlopen(self.decode + self.path))
        except urllib.error.HTTPError as error:
            self._answer(error)

    def _compute_prompt(self, body: dict[str, Any]) -> Any:
        first = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
        first |= {
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        if "max_completion_tokens" in first:
            first["max_completion_tokens"] = 1
        with self._post(self.prefill, first) as answer:
            return json.load(answer)["kv_transfer_params"]

    def _post(self, engine: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        return urllib.request.urlopen(
            urllib.request.Request(engine + self.path, data, {"Content-Type": "application/json"})
        )

    def _answer(self, answer: Any) -> None:
        with answer:
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
            self.end_headers()
            while piece := answer.read1(CHUNK):
                self.wfile.write(piece)
                self.wfile.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    options = parser.parse_args()
    Proxy.prefill, Proxy.decode = options.prefill.rstrip("/"), options.decode.rstrip("/")
    ThreadingHTTPServer(("", options.port), Proxy).serve_forever()


if __name__ == "__main__":
    main()
