"""Alembic's entry: runs the revisions on the connection, and in the transaction, that the service hands over."""

from alembic import context

from planner_service.platform.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # SQLite's tables can be changed inside a transaction; the driver's own handling, which is off here, could not.
    transactional_ddl=True,
    render_as_batch=True,
)
context.run_migrations()
