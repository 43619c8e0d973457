# Images of the operator and of the worker pods, from the repository's root:
#
#   docker build --target operator    -t trainium-operator:0.1.0 .
#   docker build --target trainer     -t trainium-trainer:0.1.0 .       # Trainium 1: the vendor's last image with torch-xla
#   docker build --target trainer     -t trainium-trainer:0.1.0 --build-arg NEURON_IMAGE=IMAGE .   # Trainium 2, 3, or your own
#   docker build --target trainer-cpu -t trainium-trainer:0.1.0-cpu .   # no accelerator; needs no vendor's image
#   docker build --target trainer-cpu -t trainium-trainer:0.1.0-cuda --build-arg TORCH_INDEX= .    # NVIDIA GPUs
#   docker build --target agent       -t trainium-agent:0.1.0 .         # what is added to the image of a program
#
# An image has the wheels of the contract and of its own distribution, and their requirements at the versions and hashes of
# constraints.txt. The vendor's image needs Python 3.11 or newer; its torch and the packages of that torch are kept.
# The last step of each image starts what it holds, as the image's user.
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm
ARG NEURON_IMAGE=public.ecr.aws/neuron/pytorch-training-neuronx:2.9.0-neuronx-py312-sdk2.30.0-ubuntu24.04

FROM ${PYTHON_IMAGE} AS wheels
WORKDIR /source
COPY constraints.txt LICENSE ./
COPY scripts/image_requirements.py scripts/
COPY contract contract
RUN python scripts/image_requirements.py build >/tmp/requirements.txt \
    && pip install --no-cache-dir --no-deps --require-hashes -r /tmp/requirements.txt

FROM wheels AS operator-wheels
COPY operator operator
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels ./contract ./operator

FROM wheels AS agent-wheels
COPY agent agent
COPY worker worker
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels ./contract ./worker ./agent

FROM wheels AS trainer-wheels
COPY agent agent
COPY worker worker
COPY trainer_image trainer_image
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels ./contract ./worker ./agent ./trainer_image

# Files for the installation in other stages, which mount them, so that no layer contains them.
FROM scratch AS operator-source
COPY constraints.txt /
COPY scripts/image_requirements.py /scripts/
COPY contract/pyproject.toml /contract/
COPY operator/pyproject.toml /operator/
COPY --from=operator-wheels /wheels /wheels

FROM scratch AS agent-source
COPY constraints.txt /
COPY scripts/image_requirements.py scripts/agent_folder.py /scripts/
COPY contract/pyproject.toml /contract/
COPY agent/pyproject.toml /agent/
COPY worker/pyproject.toml /worker/
COPY --from=agent-wheels /wheels /wheels

FROM scratch AS trainer-source
COPY constraints.txt /
COPY scripts/image_requirements.py scripts/torch_cpu.txt /scripts/
COPY contract/pyproject.toml /contract/
COPY agent/pyproject.toml /agent/
COPY worker/pyproject.toml /worker/
COPY trainer_image/pyproject.toml /trainer_image/
COPY --from=trainer-wheels /wheels /wheels

FROM ${PYTHON_IMAGE} AS operator
RUN --mount=from=operator-source,target=/source \
    cd /source \
    && python scripts/image_requirements.py operator >/tmp/requirements.txt \
    && pip install --no-cache-dir --no-deps --require-hashes -r /tmp/requirements.txt \
    && pip install --no-cache-dir --no-deps wheels/*.whl \
    && find "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
        \( -type d -name tests -o -path '*/kubernetes/*/models/__pycache__/v*' -o -path '*/kubernetes/*/api/__pycache__' \) \
        -prune -exec rm -r {} + \
    && rm /tmp/requirements.txt
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 65532:65532
EXPOSE 8443 8080
LABEL org.opencontainers.image.title="trainium-operator" \
      org.opencontainers.image.description="Kubernetes operator for training on AWS Trainium" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN trainium-operator --help >/dev/null
ENTRYPOINT ["trainium-operator"]

FROM ${PYTHON_IMAGE} AS agent-folder
RUN --mount=from=agent-source,target=/source \
    cd /source \
    && python scripts/image_requirements.py agent >/tmp/requirements.txt \
    && pip install --no-cache-dir --no-deps --require-hashes --target /tmp/site -r /tmp/requirements.txt \
    && pip install --no-cache-dir --no-deps --target /tmp/site wheels/*.whl \
    && python scripts/agent_folder.py /trainium /tmp/site

# Contains only the folder, which the operator copies into the pods of programs.
FROM scratch AS agent
COPY --from=agent-folder /trainium /trainium
USER 65532:65532
LABEL org.opencontainers.image.title="trainium-agent" \
      org.opencontainers.image.description="Agent for the worker pods of a program, with an interpreter for any image" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN ["/trainium/lib/ld.so", "--library-path", "/trainium/lib", "/trainium/bin/python", "-I", "-c", \
     "import trainium_agent.bootstrap, trainium_agent.supervisor"]
ENTRYPOINT ["/trainium/lib/ld.so", "--library-path", "/trainium/lib", "/trainium/bin/python", "-I", "-m", "trainium_agent"]

FROM ${PYTHON_IMAGE} AS trainer-cpu
# Index of torch without CUDA. If it is empty, the image has the torch of constraints.txt, with CUDA and triton.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# A torch of the base is not replaced: image_requirements.py omits installed packages.
RUN --mount=from=trainer-source,target=/source \
    cd /source \
    && if [ -n "${TORCH_INDEX}" ] && ! python -c 'import torch' 2>/dev/null; then \
        pip install --no-cache-dir --no-deps --require-hashes --index-url "${TORCH_INDEX}" -r scripts/torch_cpu.txt \
        || { echo "${TORCH_INDEX} has no CPU wheel of torch: build with --build-arg TORCH_INDEX=MIRROR, or, for torch with CUDA," \
            "with --build-arg TORCH_INDEX=" >&2; exit 1; }; \
    fi \
    && python scripts/image_requirements.py trainer >/tmp/requirements.txt \
    && pip install --no-cache-dir --no-deps --require-hashes -r /tmp/requirements.txt \
    && pip install --no-cache-dir --no-deps wheels/*.whl \
    && find "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" -type d -name tests -prune -exec rm -r {} + \
    && rm /tmp/requirements.txt
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 1000:1000
LABEL org.opencontainers.image.title="trainium-trainer" \
      org.opencontainers.image.description="Trainer of language models, without an accelerator" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN python -c 'import torch, trainium_agent.supervisor, trainium_trainer.warm' && trainium-trainer --help >/dev/null
# The agent is process 1: it reaps its children and passes SIGTERM on to the ranks.
ENTRYPOINT ["trainium-agent"]

FROM ${NEURON_IMAGE} AS trainer
USER 0:0
# The vendor's torch is not replaced: image_requirements.py omits installed packages.
RUN --mount=from=trainer-source,target=/source \
    cd /source \
    && python3 -c 'import importlib.util as found, sys; found.find_spec("torch") or sys.exit("NEURON_IMAGE has no torch")' \
    && python3 scripts/image_requirements.py trainer >/tmp/requirements.txt \
    && python3 -m pip install --no-cache-dir --no-deps --require-hashes -r /tmp/requirements.txt \
    && python3 -m pip install --no-cache-dir --no-deps wheels/*.whl \
    && rm /tmp/requirements.txt
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
WORKDIR /
USER 1000:1000
LABEL org.opencontainers.image.title="trainium-trainer" \
      org.opencontainers.image.description="Trainer of language models on AWS Trainium" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN python3 -c 'import torch, trainium_agent.supervisor, trainium_trainer.warm' && trainium-trainer --help >/dev/null
ENTRYPOINT ["trainium-agent"]
