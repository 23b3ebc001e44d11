# The sidecar: probes, status, metrics, page. No torch, no vLLM, and no pip in what is shipped.
ARG PYTHON_IMAGE

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY requirements-dev.lock ./
RUN --mount=type=bind,source=docker/build,target=/docker --mount=type=secret,id=ca --mount=type=secret,id=pip \
    --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv --without-pip /build \
    && /docker/pip --python /build/bin/python install --quiet --constraint requirements-dev.lock hatchling
COPY LICENSE README.md pyproject.toml ./
# What it needs, apart from it: so a change of our code installs our code alone.
RUN python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
      > /requirements.txt
COPY service service
RUN /build/bin/python -m hatchling build --target wheel --directory /wheel

FROM ${PYTHON_IMAGE} AS inventory
ARG CYCLONEDX
RUN --mount=type=bind,source=docker/build,target=/docker --mount=type=secret,id=ca --mount=type=secret,id=pip \
    --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv --without-pip /inventory \
    && /docker/pip --python /inventory/bin/python install --quiet "${CYCLONEDX}"

FROM ${PYTHON_IMAGE} AS dependencies
RUN python3 -m venv --without-pip /opt/kimi-k3
COPY requirements.lock /opt/kimi-k3/
RUN --mount=type=bind,source=docker/build,target=/docker --mount=type=secret,id=ca --mount=type=secret,id=pip \
    --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=wheel,source=/requirements.txt,target=/requirements.txt \
    /docker/pip --python /opt/kimi-k3/bin/python install --quiet --constraint /opt/kimi-k3/requirements.lock \
      --requirement /requirements.txt
RUN --mount=type=bind,source=docker/build,target=/docker \
    --mount=type=bind,from=inventory,source=/inventory,target=/inventory \
    /docker/inventory /opt/kimi-k3

FROM ${PYTHON_IMAGE}
COPY --from=dependencies /opt/kimi-k3 /opt/kimi-k3
# Any uid may run it if its group is 0, as on OpenShift; a volume takes over the directory's owner and mode.
RUN install --directory --owner=10001 --group=0 --mode=0775 /state /cache
# Ours comes last, in a layer that is thin.
RUN --mount=type=bind,source=docker/build,target=/docker --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    --mount=type=bind,from=inventory,source=/inventory,target=/inventory \
    /docker/pip --python /opt/kimi-k3/bin/python install --quiet --no-deps --no-index /wheel/*.whl \
    && /docker/inventory /opt/kimi-k3 --no-validate
ARG VERSION
LABEL org.opencontainers.image.title="kimi-k3-gfx942 sidecar" \
      org.opencontainers.image.description="Probes, status, metrics and page of a Kimi-K3 deployment" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
ENV PATH=/opt/kimi-k3/bin:$PATH HOME=/cache KIMI_K3_STATE_DIR=/state KIMI_K3_SIDECAR_HOST=0.0.0.0 \
    PYTHONUNBUFFERED=1
USER 10001:0
EXPOSE 8001
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
  CMD ["python", "-c", "import os, ssl, urllib.request as web; e = lambda name: os.environ.get('KIMI_K3_SIDECAR_' + name, ''); web.urlopen(f\"http{'s' if e('TLS_CERT_FILE') else ''}://127.0.0.1:{e('PORT') or 8001}/livez\", timeout=4, context=ssl._create_unverified_context())"]
ENTRYPOINT ["kimi-k3"]
CMD ["sidecar"]
