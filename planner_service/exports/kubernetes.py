"""Kubernetes: an Indexed Job, a pod a node, which find one another through a headless Service."""

from planner_service.exports.node_script import commented, node_script, nodes_of, notes_of
from planner_service.exports.source import Source

_MANIFEST = """apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}
data:
  node.sh: |
{script}---
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


def write(source: Source) -> str:
    """The manifests. Raises InvalidInputError where the plan cannot be executed so."""
    nodes = nodes_of(source)
    on_cpu = "cpu" in source.cluster.device.name.lower()
    script = "".join(f"    {line}\n" if line else "\n" for line in node_script(source).splitlines())
    notes = [
        source.title,
        *notes_of(source),
        "Fill in DATA and STEPS below, the image of the agent, and the claim that holds the runs"
        + (" (ReadWriteMany: all pods write to it)." if nodes > 1 else "."),
        "A Job starts its pods one by one: where several compete for GPUs, let a queue such as Kueue admit it whole.",
    ]
    manifest = _MANIFEST.format(
        name=f"pipeplan-{source.plan_id[:8]}",
        nodes=nodes,
        script=script,
        resources="" if on_cpu else _GPUS.format(gpus=source.plan.workers // nodes),
    )
    return commented(notes) + manifest
