"""The configuration: TOML → frozen Config; every problem at once, relations validated, `${CREDENTIALS_DIRECTORY}`."""

from powerguard.config.parse import FILE, load, loads
from powerguard.config.values import (
    Config,
    HaltConfig,
    LogConfig,
    MetricsConfig,
    NodeConfig,
    NotifyConfig,
    PeersConfig,
    Secret,
    ShedConfig,
    UpsConfig,
    describe_change,
)

__all__ = [
    "FILE",
    "Config",
    "HaltConfig",
    "LogConfig",
    "MetricsConfig",
    "NodeConfig",
    "NotifyConfig",
    "PeersConfig",
    "Secret",
    "ShedConfig",
    "UpsConfig",
    "describe_change",
    "load",
    "loads",
]
