# Images of the operator and of the worker pods, from the repository's root:
#
#   docker build --target operator -t trainium-operator:0.1.0 .
#   docker build --target trainer  -t trainium-trainer:0.1.0 .
#   docker build --target trainer  -t trainium-trainer:0.1.0 --build-arg BASE=<the vendor's Neuron PyTorch image> .
#
# Every package is installed at the version and hash of constraints.txt. BASE needs Python 3.11 or newer; a torch that it
# brings is kept (on Trainium it must be the vendor's).
ARG BASE=python:3.11-slim

FROM python:3.11-slim AS wheel
WORKDIR /source
COPY pyproject.toml constraints.txt ./
COPY scripts/image_requirements.py scripts/
RUN python scripts/image_requirements.py build >/tmp/requirements.txt \
    && pip install --no-cache-dir --no-deps --require-hashes -r /tmp/requirements.txt
COPY README.md ./
COPY contract contract
COPY devcluster/trainium_devcluster devcluster/trainium_devcluster
COPY operator operator
COPY trainer_image trainer_image
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM python:3.11-slim AS operator
WORKDIR /install
COPY --from=wheel /source/pyproject.toml /source/constraints.txt ./
COPY --from=wheel /source/scripts scripts
COPY --from=wheel /wheels /wheels
RUN python scripts/image_requirements.py operator >/tmp/requirements.txt \
    && pip install --no-cache-dir --no-deps --require-hashes -r /tmp/requirements.txt \
    && pip install --no-cache-dir --no-deps /wheels/*.whl \
    && rm -r /install /wheels /tmp/requirements.txt
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
WORKDIR /
USER 65532:65532
EXPOSE 8443 8080
ENTRYPOINT ["trainium-operator"]

FROM ${BASE} AS trainer
USER 0:0
WORKDIR /install
COPY --from=wheel /source/pyproject.toml /source/constraints.txt ./
COPY --from=wheel /source/scripts scripts
COPY --from=wheel /wheels /wheels
RUN python3 scripts/image_requirements.py trainer >/tmp/requirements.txt \
    && python3 -m pip install --no-cache-dir --no-deps --require-hashes -r /tmp/requirements.txt \
    && python3 -m pip install --no-cache-dir --no-deps /wheels/*.whl \
    && rm -r /install /wheels /tmp/requirements.txt
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
WORKDIR /
USER 1000:1000
# The agent is process 1: it reaps its children and passes SIGTERM on to the ranks.
ENTRYPOINT ["trainium-agent"]
