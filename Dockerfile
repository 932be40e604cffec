# Never built: there was no container engine where this was written. Its steps were run by hand, outside of one.
#
#   docker build -t lockstep .
#   docker run -p 127.0.0.1:8000:8000 -v lockstep-cache:/cache lockstep
#
# Other options and models: docker run ... lockstep serve /models/some.gguf --slots 8, or -e LOCKSTEP_SLOTS=8.
# Whoever can reach the published port may use the server unless it has a key: -e LOCKSTEP_API_KEY=...
FROM python:3.11-slim

COPY pyproject.toml README.md LICENSE /src/
COPY engine /src/engine
COPY scheduler /src/scheduler
COPY clients /src/clients
RUN pip install --no-cache-dir "/src[otel]" && rm -r /src

# Models that were fetched and kernels that were compiled are kept here: a volume saves both at the next start.
RUN useradd --create-home lockstep && install -d -o lockstep -g lockstep /cache
USER lockstep
WORKDIR /home/lockstep
ENV XDG_CACHE_HOME=/cache LOCKSTEP_HOST=0.0.0.0
VOLUME /cache
EXPOSE 8000

# The first start fetches a model and compiles.
HEALTHCHECK --start-period=10m --interval=10s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=5)"]

ENTRYPOINT ["lockstep"]
CMD ["serve"]
