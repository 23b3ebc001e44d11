# The engine on a CPU, to try the product: vLLM's CPU build, our package and its miniature.
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
ARG TORCH_INDEX
RUN python3 -m venv --without-pip /opt/kimi-k3
COPY requirements.lock /opt/kimi-k3/
# Without dependencies: the lock is complete, and leaves out what must not be beside torch's CPU build. Triton has no
# CPU back end: vLLM only says so.
RUN --mount=type=bind,source=docker/build,target=/docker --mount=type=secret,id=ca --mount=type=secret,id=pip \
    --mount=type=cache,target=/root/.cache/pip \
    grep '^torch==' /opt/kimi-k3/requirements.lock > /tmp/torch.lock \
    && /docker/pip --python /opt/kimi-k3/bin/python install --quiet --no-deps --extra-index-url "${TORCH_INDEX}" \
      --requirement /tmp/torch.lock \
    && grep -v '^triton==' /opt/kimi-k3/requirements.lock > /tmp/cpu.lock \
    && /docker/pip --python /opt/kimi-k3/bin/python install --quiet --no-deps --requirement /tmp/cpu.lock
RUN --mount=type=bind,source=docker/build,target=/docker \
    --mount=type=bind,from=inventory,source=/inventory,target=/inventory \
    /docker/inventory /opt/kimi-k3

FROM ${PYTHON_IMAGE}
# vLLM's CPU kernels are linked with libnuma.
# hadolint ignore=DL3008
RUN apt-get update -q && apt-get install -qy --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
COPY --from=dependencies /opt/kimi-k3 /opt/kimi-k3
# Any uid may run it if its group is 0, as on OpenShift; a volume takes over the directory's owner and mode.
RUN install --directory --owner=10001 --group=0 --mode=0775 /state /cache
# Ours comes last, in a layer that is thin.
RUN --mount=type=bind,source=docker/build,target=/docker --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    --mount=type=bind,from=inventory,source=/inventory,target=/inventory \
    /docker/pip --python /opt/kimi-k3/bin/python install --quiet --no-deps --no-index /wheel/*.whl \
    && /docker/inventory /opt/kimi-k3 --no-validate \
    && miniature="$(/opt/kimi-k3/bin/python -c 'from kimi_k3.checkpoint import shipped; print(shipped.MINIATURE)')" \
    && ln --symbolic "${miniature}" /opt/kimi-k3/miniature
ARG VERSION
LABEL org.opencontainers.image.title="kimi-k3-gfx942 on a CPU" \
      org.opencontainers.image.description="vLLM on a CPU with a miniature of Kimi-K3" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
ENV PATH=/opt/kimi-k3/bin:$PATH HOME=/cache XDG_CACHE_HOME=/cache KIMI_K3_STATE_DIR=/state PYTHONUNBUFFERED=1 \
    VLLM_CACHE_ROOT=/cache/vllm VLLM_CONFIG_ROOT=/cache/vllm-config
USER 10001:0
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=10s --start-period=15m CMD ["kimi-k3", "healthcheck"]
ENTRYPOINT ["kimi-k3"]
CMD ["serve", "/opt/kimi-k3/miniature", "--profile", "cpu-tiny", "--host", "0.0.0.0"]
