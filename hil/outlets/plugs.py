"""Plugs with a relay and an HTTP interface: Shelly (both generations of its API) and Tasmota.

The addresses and answers are those of shelly-api-docs.shelly.cloud and tasmota.github.io/docs/Commands.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from hil.outlets.what import Named, OutletFailed, secret, wait_for

TIMEOUT_S = 5.0
ANSWER_MAX_BYTES = 65536


class Shelly(Named, frozen=True, tag="shelly"):
    """Relay *channel* of the plug at *url* (`http://address`), of *generation* 1 or 2 (later ones speak as 2 does)."""

    url: str
    channel: int = 0
    generation: int = 2
    user: str = "admin"
    password_file: str = ""

    def switch(self, on: bool) -> None:
        """Returns when the relay says so."""
        if self.generation == 1:
            self._ask(f"/relay/{self.channel}?turn={'on' if on else 'off'}")
        else:
            self._ask(f"/rpc/Switch.Set?id={self.channel}&on={'true' if on else 'false'}")
        wait_for(on, self._is_on, self)

    def _is_on(self) -> bool:
        if self.generation == 1:
            return _truth(self.name, self._ask(f"/relay/{self.channel}"), "ison")
        return _truth(self.name, self._ask(f"/rpc/Switch.GetStatus?id={self.channel}"), "output")

    def _ask(self, path: str) -> dict[str, Any]:
        return _get(self.name, self.url, path, self.user, secret(self.password_file))


class Tasmota(Named, frozen=True, tag="tasmota"):
    """Relay *channel*, counted from 1, of the plug at *url*."""

    url: str
    channel: int = 1
    user: str = "admin"
    password_file: str = ""

    def switch(self, on: bool) -> None:
        """Returns when the relay says so."""
        self._command(f"Power{self.channel} {'On' if on else 'Off'}")
        wait_for(on, lambda: self._command(f"Power{self.channel}") == "ON", self)

    def _command(self, command: str) -> str:
        query = {"cmnd": command}
        if password := secret(self.password_file):
            query |= {"user": self.user, "password": password}
        answer = _get(self.name, self.url, "/cm?" + urllib.parse.urlencode(query, quote_via=urllib.parse.quote))
        said = answer.get(f"POWER{self.channel}", answer.get("POWER") if self.channel == 1 else None)
        if said not in ("ON", "OFF"):  # a plug with one relay leaves the number away
            raise OutletFailed(f"{self.name} answered {json.dumps(answer)[:200]}", todo="check channel and password")
        return str(said)


def _truth(name: str, answer: dict[str, Any], key: str) -> bool:
    value = answer.get(key)
    if not isinstance(value, bool):
        raise OutletFailed(f"{name} answered {json.dumps(answer)[:200]}", todo="check channel and generation")
    return value


def _get(name: str, url: str, path: str, user: str = "", password: str = "") -> dict[str, Any]:
    """The JSON object at *path*. A password is given as the plug asks for it: Basic or Digest with SHA-256."""
    try:
        try:
            return _fetch(url + path, {})
        except urllib.error.HTTPError as error:
            asked = error.headers.get("WWW-Authenticate", "")
            if error.code != http.client.UNAUTHORIZED or not password:
                raise
            return _fetch(url + path, {"Authorization": _proof(asked, path, user, password)})
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise OutletFailed(
            f"{name} at {url}: {error}", todo="check its address and password; switch it by hand"
        ) from None


def _fetch(url: str, headers: dict[str, str]) -> dict[str, Any]:
    request = urllib.request.Request(url, headers=headers)
    # a proxy is for the internet, and a redirect would switch something else
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Straight)
    with opener.open(request, timeout=TIMEOUT_S) as answer:
        value = json.loads(answer.read(ANSWER_MAX_BYTES))
    if not isinstance(value, dict):
        raise ValueError(f"answered {value!r}")
    return value


class _Straight(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_args: Any) -> None:
        return None


def _proof(asked: str, path: str, user: str, password: str) -> str:
    """The Authorization header that answers *asked* (RFC 7617, RFC 7616)."""
    scheme, _, rest = asked.partition(" ")
    if scheme.lower() == "basic":
        return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
    terms = urllib.request.parse_keqv_list(urllib.request.parse_http_list(rest))
    if scheme.lower() != "digest" or terms.get("algorithm") != "SHA-256":
        raise ValueError(f"it asks for a password by {asked[:60]!r}")
    realm, nonce, client = terms.get("realm", ""), terms.get("nonce", ""), os.urandom(8).hex()
    ours, theirs = _sha256(f"{user}:{realm}:{password}"), _sha256(f"GET:{path}")
    answer = _sha256(f"{ours}:{nonce}:00000001:{client}:auth:{theirs}")
    return (
        f'Digest username="{user}", realm="{realm}", nonce="{nonce}", uri="{path}", algorithm=SHA-256, qop=auth, '
        f'nc=00000001, cnonce="{client}", response="{answer}"'
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
