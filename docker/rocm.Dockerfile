# The engine on AMD GPUs: a stock vLLM ROCm image, and our package beside what is in it. Nothing of vLLM, torch
# or AITER is changed (/docker/base says so, or the build ends), but for an AITER that cannot serve int4 on gfx942 and
# for which a replacement was named.
ARG PYTHON_IMAGE
ARG ROCM_IMAGE

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

FROM ${ROCM_IMAGE} AS inventory
ARG CYCLONEDX
# hadolint ignore=DL3002
USER 0
RUN --mount=type=bind,source=docker/build,target=/docker --mount=type=secret,id=ca --mount=type=secret,id=pip \
    --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv --without-pip /inventory \
    && /docker/pip --python /inventory/bin/python install --quiet "${CYCLONEDX}"

FROM ${ROCM_IMAGE}
# hadolint ignore=DL3002
USER 0
WORKDIR /opt/kimi-k3
# What the base has is seen from the new environment; what we bring lies in it, where the base never looks.
RUN --mount=type=bind,source=docker/build,target=/docker \
    python3 /docker/base record base.json constraints.txt \
    && python3 -m venv --without-pip --system-site-packages /opt/kimi-k3 \
    && python3 /docker/base path > "$(bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
RUN --mount=type=bind,source=docker/build,target=/docker --mount=type=secret,id=ca --mount=type=secret,id=pip \
    --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=wheel,source=/requirements.txt,target=/requirements.txt \
    /docker/pip --python /opt/kimi-k3/bin/python install --quiet --constraint constraints.txt \
      --requirement /requirements.txt
RUN --mount=type=bind,source=docker/build,target=/docker \
    --mount=type=bind,from=inventory,source=/inventory,target=/inventory \
    /docker/inventory /opt/kimi-k3
RUN --mount=type=bind,source=docker/build,target=/docker --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    /docker/pip --python /opt/kimi-k3/bin/python install --quiet --no-deps --no-index /wheel/*.whl \
    && bin/python /docker/base check base.json
ARG AITER_REPLACEMENT
RUN --mount=type=bind,source=docker/build,target=/docker --mount=type=secret,id=ca --mount=type=secret,id=pip \
    /docker/aiter "${AITER_REPLACEMENT}"
RUN --mount=type=bind,source=docker/build,target=/docker \
    --mount=type=bind,from=inventory,source=/inventory,target=/inventory \
    /docker/inventory /opt/kimi-k3 --no-validate
ARG KERNELS
ARG KERNELS_PROFILE
RUN case "${KERNELS}" in \
      ahead) bin/kimi-k3 kernels build --profile "${KERNELS_PROFILE}" --cache-dir /opt/kimi-k3/kernels ;; \
      later) ;; \
      *) echo "kernels: error: KERNELS=${KERNELS} (docker/versions.env): it must be ahead or later" >&2; exit 1 ;; \
    esac
ARG VERSION
ARG ROCM_IMAGE
LABEL org.opencontainers.image.title="kimi-k3-gfx942" \
      org.opencontainers.image.description="Kimi-K3 on AMD MI325X and MI300X: stock vLLM and our plugin" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.base.name="${ROCM_IMAGE}"
ENV PATH=/opt/kimi-k3/bin:$PATH HOME=/cache XDG_CACHE_HOME=/cache KIMI_K3_STATE_DIR=/state PYTHONUNBUFFERED=1 \
    VLLM_CACHE_ROOT=/cache/vllm VLLM_CONFIG_ROOT=/cache/vllm-config TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor TORCH_EXTENSIONS_DIR=/cache/torch-extensions
# Any uid may run it if its group is 0, as on OpenShift; a volume takes over the directory's owner and mode.
# A base that cannot serve int4 on gfx942 ends here; what is not certain is only told.
RUN install --directory --owner=10001 --group=0 --mode=0775 /state /cache /models \
    && kimi-k3 preflight --image --warnings-pass
WORKDIR /cache
USER 10001:0
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=10s --start-period=2h CMD ["kimi-k3", "healthcheck"]
ENTRYPOINT ["kimi-k3"]
CMD ["--help"]
