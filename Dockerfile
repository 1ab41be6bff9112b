# A server in a container. Not tried in one yet: there was no container engine where this was written. The same steps, a wheel with its
# kernels in an environment of its own, are what tests/test_packaging.py does.
#
#   docker build -t jaxspec .                                  # CPU
#   docker build -t jaxspec --build-arg EXTRAS=gguf,cuda12 .   # NVIDIA GPU; run it with --gpus all
#   docker run -p 30000:30000 -e JAXSPEC_API_KEY -v jaxspec-cache:/home/jaxspec/.cache jaxspec serve --host 0.0.0.0 --model-path NAME
#
# Without arguments it serves the built-in model. Downloads and compiled programs are in /home/jaxspec/.cache.
FROM python:3.12-slim AS build
ARG EXTRAS=gguf
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/jaxspec
COPY . /source
RUN /opt/jaxspec/bin/pip install --no-cache-dir "/source[${EXTRAS}]"

FROM python:3.12-slim
COPY --from=build /opt/jaxspec /opt/jaxspec
ENV PATH=/opt/jaxspec/bin:$PATH
RUN useradd --create-home jaxspec && install -d -o jaxspec /home/jaxspec/.cache
USER jaxspec
VOLUME /home/jaxspec/.cache
EXPOSE 30000
ENTRYPOINT ["jaxspec"]
CMD ["serve", "--host", "0.0.0.0"]
