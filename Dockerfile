# The server. CUDA comes with the locked packages; of the host the image needs the NVIDIA driver and its container toolkit.
# docker build -t sparda .                             CUDA 13, driver >= 580; CUDA 12: --build-arg LOCK=cuda12; CPU: LOCK=base
# docs/operating.md says how to run it.
FROM python:3.12-slim

ARG LOCK=cuda
COPY requirements/${LOCK}.lock /tmp/packages.lock
RUN pip install --no-cache-dir --no-deps --require-hashes --requirement /tmp/packages.lock

# Folders that the links in sparda_jax/ lead to stand beside it, as in a checkout.
WORKDIR /app
COPY LICENSE ./
COPY pallas_kernels ./pallas_kernels
COPY train ./train
COPY serve ./serve
COPY sparda_jax ./sparda_jax

# The numbers, not the names, so that a cluster can tell that it isn't root.
RUN useradd --system --uid 10001 --user-group --no-create-home sparda \
    && mkdir /models /cache \
    && chown 10001:10001 /cache
USER 10001:10001
VOLUME ["/models", "/cache"]

ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/cache \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

EXPOSE 8000
# Starting takes as long as the model and its programs need, so the start period is generous; any 200 ends it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["python", "-m", "sparda_jax.serve", "--host", "0.0.0.0", "--port", "8000", "--log-format", "json"]
