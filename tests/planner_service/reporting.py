"""An agent's last words, as its spool sends them."""

from pipeplan.protocol.jobs import AgentResult, Job, Lease
from worker_agent.agent.client import AgentClient
from worker_agent.agent.spool import completion, failure


def complete(agent: AgentClient, lease: Lease, result: AgentResult) -> Job:
    """Says that the job went well; the same again is the same report."""
    report = completion(lease, result, "0" * 32)
    return agent.report(report.path, report.body)


def fail(agent: AgentClient, lease: Lease, error: str) -> Job:
    """Says that it did not."""
    report = failure(lease, error, "1" * 32)
    return agent.report(report.path, report.body)
