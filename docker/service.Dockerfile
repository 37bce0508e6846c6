# The service: API, dashboard, planners. Built from the root of the repository:
#   docker build -f docker/service.Dockerfile -t pipeplan-service .
ARG BASE=docker.io/library/python:3.11.13-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY pipeplan pipeplan
COPY planner_service planner_service
COPY worker_agent worker_agent
COPY migrations migrations
RUN python3 -m venv /opt/pipeplan \
 && /opt/pipeplan/bin/pip install --no-cache-dir -c constraints.txt '.[service]'

# hadolint ignore=DL3006
FROM ${BASE}
COPY --from=build /opt/pipeplan /opt/pipeplan
RUN groupadd --system --gid 10001 pipeplan \
 && useradd --system --uid 10001 --gid 10001 --home-dir /var/lib/pipeplan --create-home pipeplan \
 && install --directory --owner=10001 --group=10001 --mode=700 /var/lib/pipeplan/backups
ENV PATH=/opt/pipeplan/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PIPEPLAN_LOG_FORMAT=json
USER 10001:10001
WORKDIR /var/lib/pipeplan
EXPOSE 8437
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15s --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8437/healthz', timeout=4)"]
ENTRYPOINT ["pipeplan"]
CMD ["serve"]
