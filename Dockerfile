# hotswap with the locked versions of its packages:
#     docker build -t hotswap . && docker run --rm hotswap
# --gpus needs the NVIDIA Container Toolkit. The packages bring CUDA, the image brings the C++ compiler for torch.compile.
FROM python:3.11-bookworm
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility PIP_NO_CACHE_DIR=1
WORKDIR /hotswap
COPY . .
RUN PIP_CONSTRAINT=requirements.lock make .venv/installed
CMD ["make", "smoke"]
