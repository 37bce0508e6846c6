# A node's agent: profiles models and takes part in runs. Built from the root of the repository:
#   docker build -f docker/agent.Dockerfile -t pipeplan-agent .
# TORCH_INDEX is where torch comes from: CPU builds, or those of the node's CUDA.
ARG BASE=docker.io/library/python:3.11.13-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY pipeplan pipeplan
COPY planner_service planner_service
COPY worker_agent worker_agent
COPY migrations migrations
RUN python3 -m venv /opt/pipeplan \
 && /opt/pipeplan/bin/pip install --no-cache-dir -c constraints.txt --extra-index-url "${TORCH_INDEX}" '.[worker]'

# hadolint ignore=DL3006
FROM ${BASE}
COPY --from=build /opt/pipeplan /opt/pipeplan
RUN groupadd --system --gid 10001 pipeplan \
 && useradd --system --uid 10001 --gid 10001 --home-dir /var/lib/pipeplan --create-home pipeplan
ENV PATH=/opt/pipeplan/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PIPEPLAN_AGENT_WORK_DIR=/var/lib/pipeplan
USER 10001:10001
WORKDIR /var/lib/pipeplan
STOPSIGNAL SIGTERM
# An agent that cannot reach its service goes on with what it has: it is not restarted for that.
HEALTHCHECK --interval=30s --timeout=10s --start-period=30s --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as u; u.urlopen(os.environ['PIPEPLAN_AGENT_URL'] + '/healthz', timeout=8)"]
ENTRYPOINT ["pipeplan-agent"]
CMD ["start"]
