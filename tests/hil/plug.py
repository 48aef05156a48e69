"""Plugs on this host that speak the documented HTTP interfaces, each with a relay that can be watched and be stuck."""

from __future__ import annotations

import hashlib
import json
import threading
import urllib.parse
from base64 import b64encode
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REALM, NONCE = "shellyplug-a1b2c3", "60dc59c6"


class Plug:
    """*api* is "shelly1", "shelly2" or "tasmota"; with *password* the plug asks for it as the real one does."""

    def __init__(self, api: str, *, password: str = "", relays: int = 2, moved: Callable[[bool], None] | None = None):
        self.api, self.password, self.moved = api, password, moved
        self.relays = [True] * relays
        self.stuck = False  # the contacts are welded: it says OK, and stays
        self.asked: list[str] = []
        plug = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                plug.asked.append(self.path)
                status, headers, answer = plug.answer(self.path, self.headers.get("Authorization", ""))
                body = json.dumps(answer).encode()
                self.send_response(status)
                for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_args):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, proof: str) -> tuple[int, dict[str, str], object]:
        """(status, headers, JSON)."""
        where = urllib.parse.urlsplit(path)
        query = dict(urllib.parse.parse_qsl(where.query))
        if self.api == "tasmota":
            return 200, {}, self._tasmota(query) if where.path == "/cm" else {}
        if self.password and not self._proven(path, proof):
            asks = (
                'Basic realm="shelly"'
                if self.api == "shelly1"
                else f'Digest qop="auth", realm="{REALM}", nonce="{NONCE}", algorithm=SHA-256'
            )
            return 401, {"WWW-Authenticate": asks}, {}
        return self._shelly1(where.path, query) if self.api == "shelly1" else self._shelly2(where.path, query)

    def _move(self, number: int, on: bool) -> None:
        if not self.stuck:
            self.relays[number] = on
            if self.moved is not None:
                self.moved(on)

    def _shelly1(self, path: str, query: dict[str, str]) -> tuple[int, dict[str, str], object]:
        number = int(path.removeprefix("/relay/"))
        if number >= len(self.relays):
            return 404, {}, "Not Found"
        if "turn" in query:
            self._move(number, query["turn"] == "on")
        return 200, {}, {"ison": self.relays[number], "has_timer": False, "source": "http"}

    def _shelly2(self, path: str, query: dict[str, str]) -> tuple[int, dict[str, str], object]:
        number = int(query["id"])
        if number >= len(self.relays):
            return 500, {}, {"code": -105, "message": f"Argument 'id', value {number} not found!"}
        was = self.relays[number]
        if path == "/rpc/Switch.Set":
            self._move(number, {"true": True, "false": False}[query["on"]])
            return 200, {}, {"was_on": was}
        assert path == "/rpc/Switch.GetStatus"
        return 200, {}, {"id": number, "source": "HTTP_in", "output": was, "temperature": {"tC": 30.1, "tF": 86.2}}

    def _tasmota(self, query: dict[str, str]) -> object:
        if self.password and (query.get("user"), query.get("password")) != ("admin", self.password):
            return {"WARNING": "Need user=<username>&password=<password>"}
        command, _, value = query["cmnd"].partition(" ")
        number = int(command.removeprefix("Power") or 1)
        if number > len(self.relays):
            return {"Command": "Unknown"}
        if value:
            self._move(number - 1, value.lower() in ("on", "1"))
        name = "POWER" if len(self.relays) == 1 else f"POWER{number}"
        return {name: "ON" if self.relays[number - 1] else "OFF"}

    def _proven(self, path: str, proof: str) -> bool:
        if self.api == "shelly1":
            return proof == "Basic " + b64encode(f"admin:{self.password}".encode()).decode()
        if not proof.startswith("Digest "):
            return False
        terms = {key: value.strip('"') for key, _, value in (each.partition("=") for each in proof[7:].split(", "))}
        ours, theirs = _sha256(f"admin:{REALM}:{self.password}"), _sha256(f"GET:{path}")
        wanted = _sha256(f"{ours}:{NONCE}:{terms['nc']}:{terms['cnonce']}:auth:{theirs}")
        return (terms["uri"], terms["realm"], terms["response"]) == (path, REALM, wanted)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
