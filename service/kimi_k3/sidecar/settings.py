# SPDX-License-Identifier: Apache-2.0
"""How the sidecar is set up: ``KIMI_K3_SIDECAR_*``, every one of them known or an error."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from kimi_k3.errors import ExitCode, OperatorError, nearest
from kimi_k3.words.addresses import HOST, SIDECAR_PORT
from kimi_k3.words.environment import SIDECAR_PREFIX, default_state_dir, misunderstood
from kimi_k3.words.secret import checked_secret, read_secret
from kimi_k3.words.sidecar import TOKEN, TOKEN_FILE
from kimi_k3.words.tls import Certificate, checked_certificate

PREFIX = SIDECAR_PREFIX

# What Kubernetes puts into every pod of a namespace that has a Service called "kimi-k3-sidecar".
_SERVICE_LINK = re.compile(r"(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(TCP|UDP|SCTP)\w*)")
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")


class Settings(BaseSettings):
    """The sidecar's settings; each may be given as ``KIMI_K3_SIDECAR_<NAME>``."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    host: str = Field(default=HOST, description="Address to listen on.")
    port: int = Field(
        default=SIDECAR_PORT, ge=0, le=65535, description="Port to listen on; 0 takes a free one."
    )
    state_dir: Path = Field(
        default_factory=default_state_dir,
        description="Directory that the supervisor and the engine's workers write; by default the one "
        "that KIMI_K3_STATE_DIR names to all of them.",
    )
    engine_host: str | None = Field(
        default=None,
        min_length=1,
        description="Where the engine is reached, its port as recorded; by default as its own machine "
        "reaches it, which a sidecar in another container does not.",
    )
    engine_timeout_seconds: float = Field(
        default=2.0,
        gt=0,
        le=60,
        description="How long the engine's /health may take. A probe of /readyz "
        "needs a longer timeout than this.",
    )
    engine_tls_verify: bool = Field(
        default=True,
        description="Whether to check the engine's certificate when its URL is https. No secret is sent.",
    )
    poll_seconds: float = Field(
        default=1.0, gt=0, le=10, description="How often the engine's health is asked for."
    )
    refresh_seconds: float = Field(
        default=0.25, ge=0, le=10, description="How old what was read from the state directory may be."
    )
    token: SecretStr | None = Field(
        default=None,
        description="What a client must send as `Authorization: Bearer ...` for everything but the probes "
        "and the page; without it nothing is asked for.",
    )
    token_file: Path | None = Field(default=None, description="A file that holds the token, on one line.")

    tls_cert_file: Path | None = Field(
        default=None, description="Serve TLS with this certificate (PEM); read at the start."
    )
    tls_key_file: Path | None = Field(default=None, description="Its key.")

    @classmethod
    def read(cls) -> Settings:
        """Read and check the process's environment.

        Raises:
            OperatorError: a variable has a value that is not understood, or a name that is not known.
        """
        known = {PREFIX + name.upper() for name in cls.model_fields}
        for name, value in sorted(os.environ.items()):
            if name.upper().startswith(PREFIX):
                _refuse_service_link(name, value)
                if name.upper() not in known:
                    raise OperatorError(
                        f"environment variable {name} is not known",
                        remedy=nearest(name.upper(), known),
                        exit_code=ExitCode.USAGE,
                    )
        try:
            settings = cls()
        except ValidationError as error:
            raise misunderstood(PREFIX, error) from None
        return settings.model_copy(update={"token": settings._checked_token(), "token_file": None})

    @property
    def tls(self) -> Certificate | None:
        """What TLS is served with; ``None`` for plain HTTP.

        Raises:
            OperatorError: the two files are none, or do not belong together.
        """
        names = (PREFIX + "TLS_CERT_FILE", PREFIX + "TLS_KEY_FILE")
        return checked_certificate(self.tls_cert_file, self.tls_key_file, names=names)

    def _checked_token(self) -> SecretStr | None:
        if self.token is not None and self.token_file is not None:
            raise OperatorError(
                f"{TOKEN} and {TOKEN_FILE} are both set", remedy="set one of them", exit_code=ExitCode.USAGE
            )
        if self.token_file is not None:
            source = f"{TOKEN_FILE}={self.token_file}"
            return SecretStr(read_secret(self.token_file, what="token", source=source, variable=TOKEN))
        if self.token is not None:
            return SecretStr(checked_secret(self.token.get_secret_value(), what="token", source=TOKEN))
        return None


def _refuse_service_link(name: str, value: str) -> None:
    if _SERVICE_LINK.fullmatch(name.removeprefix(PREFIX)) or _SERVICE_LINK_VALUE.match(value):
        raise OperatorError(
            f"environment variable {name}={value!r} was set by Kubernetes for a Service, not for the sidecar",
            remedy="set enableServiceLinks: false in the pod",
            exit_code=ExitCode.USAGE,
        )
