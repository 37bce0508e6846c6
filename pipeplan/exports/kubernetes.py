"""Kubernetes: an Indexed Job with a pod for every node. The pods find each other through a headless Service."""

from pipeplan.exports.nodes import commented, nodes_of, notes_of, plan_json, require_chain, run_lines, settings_of
from pipeplan.exports.source import ExportSource

_MANIFEST = """apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}
data:
  node.sh: |
{script}  plan.json: |
    {plan}
---
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    job-name: {name}
  ports:
    - name: rendezvous
      port: 29500
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {nodes}
  parallelism: {nodes}
  backoffLimit: 0
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      containers:
        - name: agent
          image: pipeplan-agent
          command: ["bash", "/plan/node.sh"]
          args: []
          env:
            - name: DATA
              value: ""
            - name: STEPS
              value: ""
            - name: OUT
              value: /runs/{name}
            - name: MASTER_ADDR
              value: {name}-0.{name}
{resources}          volumeMounts:
            - name: plan
              mountPath: /plan
            - name: runs
              mountPath: /runs
            - name: shared-memory
              mountPath: /dev/shm
      volumes:
        - name: plan
          configMap:
            name: {name}
        - name: runs
          persistentVolumeClaim:
            claimName: pipeplan-runs
        - name: shared-memory
          emptyDir:
            medium: Memory
"""

_GPUS = """          resources:
            limits:
              nvidia.com/gpu: {gpus}
"""


def write(source: ExportSource) -> str:
    """The manifests. Raises InvalidInputError if the plan cannot be executed in this way."""
    require_chain(source)
    nodes = nodes_of(source)
    on_cpu = "cpu" in source.cluster.device.name.lower()
    script = "set -euo pipefail\nPLAN_FILE=/plan/plan.json\n" + settings_of(source) + run_lines(source)
    notes = [
        *source.heading,
        *notes_of(source, "The container's args"),
        "Fill in DATA and STEPS below, the image of the agent, and the claim that holds the runs"
        + (" (ReadWriteMany: all pods write to it)." if nodes > 1 else "."),
        "A Job starts its pods one by one: where several compete for GPUs, let a queue such as Kueue admit it whole.",
    ]
    manifest = _MANIFEST.format(
        name=f"pipeplan-{source.short_id}",
        nodes=nodes,
        script="".join(f"    {line}\n" for line in script.splitlines()),
        plan=plan_json(source),
        resources="" if on_cpu else _GPUS.format(gpus=source.plan.workers // nodes),
    )
    return commented(notes) + manifest
