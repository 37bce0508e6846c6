"""Reports: the ids of those that were taken, so that a repetition is known as one."""

from datetime import datetime

from sqlalchemy import Connection, insert, select

from planner_service.storage.tables import reports


def taken(connection: Connection, report_id: str | None) -> str | None:
    """The id of the job that the report was taken for; None for one that was not. The transaction must hold its job."""
    if report_id is None:
        return None
    return connection.execute(select(reports.c.job_id).where(reports.c.id == report_id)).scalar_one_or_none()


def take(connection: Connection, report_id: str | None, job_id: str, now: datetime) -> None:
    """Keeps a report's id, in the transaction of what it does. One that names none is not kept."""
    if report_id is not None:
        connection.execute(insert(reports).values(id=report_id, job_id=job_id, created_at=now))
