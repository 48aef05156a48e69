"""The TLS context for a UPS that wants one: certificates are verified, or there is no connection."""

from __future__ import annotations

import ssl

from powerguard.config import UpsConfig
from powerguard.errors import ConfigError


def context(ups: UpsConfig) -> ssl.SSLContext | None:
    """For STARTTLS; None where the configuration asks for plain text. ConfigError: the CA file is no PEM file."""
    if ups.tls == "off":
        return None
    try:
        return ssl.create_default_context(cafile=ups.tls_ca or None)
    except (OSError, ssl.SSLError) as err:
        why = getattr(err, "reason", None) or getattr(err, "strerror", None) or str(err)
        raise ConfigError(
            f"{ups.name}: tls_ca {ups.tls_ca}: {why}", todo="give the CA's certificate in PEM form"
        ) from None
