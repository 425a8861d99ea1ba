# The server of docs/serving.md, for CPUs: docker build -t gramtower . && docker run -p 127.0.0.1:8000:8000 -v "$PWD/run:/model:ro" gramtower
# Checked by tests/test_dockerfile.py for what it names.
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN python -m venv /opt/gramtower \
 && /opt/gramtower/bin/pip install --no-cache-dir --disable-pip-version-check \
    --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt ".[serve,ann,cloud]"

FROM python:3.12-slim
COPY --from=build /opt/gramtower /opt/gramtower
ENV PATH=/opt/gramtower/bin:$PATH PYTHONUNBUFFERED=1 NUMBA_CACHE_DIR=/tmp/numba
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
ENTRYPOINT ["gramtower", "serve"]
CMD ["/model", "--host", "0.0.0.0", "--port", "8000", "--watch"]
