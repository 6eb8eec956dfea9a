# One image for every service; the command says which: scheduler, worker or frontend.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
# cpu or cuda: which build of torch goes in.
ARG TORCH=cpu
ENV PIP_NO_CACHE_DIR=1
WORKDIR /app
# The dependencies change seldom and are big: they have layers of their own, here and below.
COPY signalbox requirements.lock requirements-dev.lock ./
RUN SIGNALBOX_TORCH=${TORCH} ./signalbox install
COPY pyproject.toml README.md LICENSE ./
RUN .venv/bin/python -m pip install -q --no-deps --no-build-isolation -e .
# The native CPU engine is compiled here: the last stage needs no compiler.
RUN command -v g++ || (apt-get update -qq && apt-get install -y -qq --no-install-recommends g++)
COPY proto proto
COPY worker worker
RUN .venv/bin/python -m worker.cpu.native.build

FROM ${BASE_IMAGE}
ARG TORCH=cpu
# Triton compiles what launches its kernels.
RUN [ "$TORCH" != cuda ] || command -v gcc || \
    (apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*)
RUN mkdir -p /run/signalbox /var/lib/signalbox /var/cache/signalbox \
    && chown 10001:10001 /run/signalbox /var/cache/signalbox && chmod 0700 /run/signalbox
COPY --from=build /app/.venv /app/.venv
WORKDIR /app
COPY LICENSE pyproject.toml ./
COPY proto proto
COPY kvpool kvpool
COPY scheduler scheduler
COPY worker worker
COPY services services
COPY --from=build /app/worker/cpu/native/build worker/cpu/native/build
RUN .venv/bin/python -m compileall -q proto kvpool scheduler worker services
ENV PATH=/app/.venv/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    SIGNALBOX_HOME=/var/lib/signalbox \
    SIGNALBOX_RUN_DIR=/run/signalbox \
    SIGNALBOX_LOG_FORMAT=json
USER 10001:10001
ENTRYPOINT ["signalbox"]
CMD ["--help"]
